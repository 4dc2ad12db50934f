"""SGLang's public tests of its storage interface: which of their checks are shown to hold here, by which test of ours.

`python -m tests.upstream.catalogue` writes docs/conformance.md from this table.
"""

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent.parent / "docs/conformance.md"
START = "<!-- made by python -m tests.upstream.catalogue -->\n"
KITS, END_TO_END = "tests/upstream/test_kits.py", "tests/integration/test_end_to_end.py"
FLUSHED = (
    f"{END_TO_END}::test_what_was_computed_survives_flush_kill_and_restart_byte_for_byte",
    f"{END_TO_END}::test_the_engine_api_with_pages_of_one_token_and_the_layer_first_layout",
)
ATTACHED = f"{END_TO_END}::test_detach_and_attach_while_serving_with_the_messages_of_a_bad_store"
MODELS = "tests/integration/test_models.py"
INJECTED = "tests/integration/test_injected_faults.py"
CONTROL = "tests/integration/test_control.py::"


class Check(NamedTuple):
    """`file`: under test/registered upstream. Either `shown`, tests of ours, or `why` it is not shown here."""

    file: str
    what: str
    shown: tuple[str, ...] = ()
    why: str = ""


HICACHE = (
    Check(
        "test_hicache_storage_file_backend.py",
        "a long prompt, flushed, comes back from storage; the same with another layout and TP 2",
        (*FLUSHED, f"{END_TO_END}::test_two_tensor_parallel_ranks_each_get_their_own_half"),
    ),
    Check(
        "test_hicache_storage_file_backend.py",
        "GSM8K scores the same before and after a flush",
        why="the built-in models know no mathematics; equal greedy tokens are the stricter check",
    ),
    Check("test_hicache_storage.py", "MMLU scores well with the file backend", why="needs a trained model"),
    Check(
        "test_hicache_storage_runtime_attach_detach.py",
        "attach, detach and attach again while serving; a prompt comes back after that",
        (ATTACHED,),
    ),
    Check(
        "test_hicache_storage_runtime_attach_detach_unified.py",
        "new policies, another backend, detaching twice, a bad policy, who may; nothing is stored while detached",
        (f"{CONTROL}test_storage_comes_and_goes_and_what_is_refused_changes_nothing",),
    ),
    Check(
        "test_hicache_swa_runtime_attach.py",
        "a sliding-window model starts with a hierarchical cache and takes a backend while it serves",
        (f"{MODELS}::test_a_model_of_another_kind_takes_the_tier_while_it_serves",),
    ),
    Check(
        "test_hicache_buffer_only.py",
        "a prompt comes back through host memory that is only a buffer, which is empty in the end",
        (
            f"{END_TO_END}::"
            "test_another_model_under_the_same_name_finds_nothing_by_the_dynamic_route_without_a_host_cache",
            f"{KITS}::test_buffer_only_restores_through_staging_and_leaves_it_empty",
        ),
    ),
    Check(
        "test_pp_with_hicache.py",
        "two pipeline stages, chunked prefill, flush: the same answers",
        (f"{MODELS}::test_what_was_computed_comes_back",),
    ),
    Check(
        "test_hicache_variants.py",
        "other page sizes and layouts, MLA: the same answers after a flush",
        (*FLUSHED, f"{MODELS}::test_what_was_computed_comes_back"),
    ),
    Check(
        "test_hicache_variants.py, test_hicache_spec_file_storage.py, test_hicache_spec_mooncake_storage.py",
        "EAGLE3: the draft's KV comes back too, and as many tokens are accepted as before",
        why="SGLang starts no draft model on the CPU platform ([its words](integration.md#beside-the-model)); the KV "
        "of drafts is shown through its pools (`tests/regressions/test_pool.py`)",
    ),
    Check(
        "test_hicache_storage_fault_tolerance.py",
        "a backend that fails is detached, and attached again when it recovers",
        why="the wheel has neither these settings (`fault_tolerance`) nor their injector; a fault here is a miss, and "
        "the tier stays attached (`tests/regressions/test_fault.py`)",
    ),
    Check(
        "hicache_storage.py, HiCacheStorageFailureInjector in the wheel",
        "calls that fail or come late at random cost no more than a miss",
        (
            f"{INJECTED}::test_two_hundred_requests_get_the_right_tokens_and_an_end",
            "tests/integration/test_ranks.py::test_sglangs_fault_and_delay_injector_gives_no_wrong_byte_and_stops_nobody",
        ),
    ),
    Check(
        "../disaggregation/test_disaggregation_decode_offload.py",
        "what a decode server computed is restored by the prefill server",
        (
            "tests/integration/test_decode_offload.py::test_a_prefill_server_finds_what_a_decode_server_offloaded",
            "tests/integration/test_disaggregation.py::"
            "test_what_either_server_computed_is_restored_by_the_prefill_server",
        ),
    ),
    Check(
        "../lora/test_lora_radix_cache.py, ../lora/test_lora_update.py",
        "adapters, from the launch or loaded later, share no prefix; so do salts and extra keys",
        (
            "tests/regressions/test_key.py::test_adapters_and_salts_keep_prompts_apart",
            "tests/integration/test_adapters.py::test_each_adapter_finds_its_own_pages",
            "tests/integration/test_adapters.py::test_an_adapter_under_a_name_that_was_in_use_finds_nothing",
        ),
    ),
    Check(
        "test_hicache_session_cache_file_backend.py",
        "a session names the file that keeps its KV",
        why="the wheel has no `--enable-session-cache`",
    ),
    Check(
        "test_force_setup_rollback.py",
        "a forced attach or detach that fails leaves I/O as it was",
        why="the wheel has no forced attach",
    ),
    Check(
        "test_model_identity_hash.py",
        "another model, dtype, quantisation, TP or PP rank has other keys",
        (
            "tests/integration/test_identity.py::test_the_published_model_is_told_from_every_other",
            "tests/integration/test_identity.py::test_ranks_share_what_is_replicated_and_nothing_else",
        ),
    ),
    Check(
        "test_hicache_storage_3fs_backend.py, _3fs_hybrid.py, _mooncake_backend.py, _umbp_backend.py",
        "the checks of the file backend with other backends",
        why="their services; the checks are those of the file backend above",
    ),
    Check(
        "test_hicache_storage_cp_backend.py, _dsv32_backend.py, _dsv32_cp_backend.py, test_qwen35_hicache.py",
        "context parallelism, DeepSeek sparse attention, gated delta networks: the same answers from storage",
        why="attention kernels that exist for GPUs only; a hybrid model is shown with Mamba2",
    ),
    Check(
        "test_hicache_l3_object_layout.py",
        "the endpoint that tells where a page lies in the storage",
        why="SGLang answers it for Mooncake only",
    ),
    Check(
        "test_hicache_kv_events.py, test_hicache_write_through_events.py, test_hicache_no_enable_prefix_caching.py",
        "events and reuse of device and host memory",
        why="no storage backend takes part",
    ),
    Check(
        "test_hicache_storage_performance_comparison.py",
        "zero copy is faster than whole tensors",
        why="a figure, not a check: docs/benchmarks.md",
    ),
)

KIT = (
    Check(
        "unit/mem_cache, TestUnifiedRadixCacheStorage",
        "what one tree stores another restores: full, sliding-window and Mamba nodes",
        (f"{KITS}::test_every_pool_comes_back_byte_for_byte",),
    ),
    Check(
        "unit/mem_cache, TestUnifiedRadixCacheStorage",
        "a longer prompt gets what is there; another prompt, salt or key nothing",
        (
            f"{KITS}::test_a_longer_prompt_finds_what_is_there_and_another_prompt_nothing",
            f"{KITS}::test_a_namespace_of_the_request_keeps_prompts_apart",
        ),
    ),
    Check(
        "unit/mem_cache, SWA prefetch over TP",
        "a window that one rank lacks is restored by none",
        (f"{KITS}::test_a_rank_without_the_window_keeps_all_from_restoring_it",),
    ),
    Check(
        "unit/mem_cache, buffer mode",
        "staged pages are spliced behind what is resident, keep what a sibling brought, and leave the buffer empty",
        (
            f"{KITS}::test_buffer_only_restores_through_staging_and_leaves_it_empty",
            f"{KITS}::test_buffer_only_keeps_what_a_sibling_brought_meanwhile",
            f"{KITS}::test_buffer_only_fetches_a_window_for_resident_kv",
        ),
    ),
    Check(
        "unit/mem_cache/test_draft_l3_graceful_degradation.py",
        "a draft pool that the backend refuses does not end the server",
        why="the method is gone from the wheel; what is refused is refused when the backend is attached",
    ),
)


def tables() -> str:
    """The part of the page that nobody types."""
    text = "## End to end: test/registered/hicache\n\n" + _table(HICACHE)
    return text + "\n## Units: the kit of the radix tree over storage\n\n" + _table(KIT)


def _table(checks: tuple[Check, ...]) -> str:
    rows = ["| SGLang's test | checks that | here |", "|---|---|---|"]
    for check in checks:
        here = "<br>".join(f"`{test}`" for test in check.shown) or f"not here, because {check.why}"
        rows.append(f"| {check.file} | {check.what} | {here} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """The page with its made part made anew."""
    return text.split(START)[0] + START + "\n" + tables()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
