"""Everything of SGLang that we hook or rely on exists here, and looks as it did when this was written."""

import inspect
import pkgutil
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

import sglang
from sglang.srt.arg_groups import pipeline, resolution_hooks
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics

from tutti_sglang.integration import hooks
from tutti_sglang.integration.hicache import TuttiHiCacheStorage


def _parameters(function: Any) -> list[str]:
    return [*inspect.signature(inspect.unwrap(function)).parameters]


def test_the_version_is_the_one_this_was_made_for() -> None:
    assert sglang.__version__ == hooks.SGLANG_VERSION


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target.split(".", 2)[2])
def test_each_hooked_target_takes_what_the_hook_expects(hook: hooks.Hook) -> None:
    owner, name = hook.target.rsplit(".", 1)
    raw = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    names = _parameters(getattr(raw, "__func__", raw))
    assert tuple(names[: len(hook.parameters)]) == hook.parameters


def test_the_backend_takes_every_call_of_the_interface() -> None:
    for name, theirs in inspect.getmembers(HiCacheStorage, inspect.isfunction):
        ours = getattr(TuttiHiCacheStorage, name)
        assert _parameters(ours)[: len(_parameters(theirs))] == _parameters(theirs), name


def test_sglang_calls_the_backend_as_we_read_it() -> None:
    source = inspect.getsource(HiCacheController) + inspect.getsource(HybridCacheController)
    for call in (
        "storage_backend.batch_exists(hash_value, extra_info)",
        "storage_backend.batch_exists_v2(",
        "storage_backend.batch_get_v1(",
        "storage_backend.batch_set_v1(hash_values, host_indices, extra_info)",
        "storage_backend.batch_get_v2(",
        "storage_backend.batch_set_v2(transfers, extra_info=extra_info)",
        "self.page_get_func = self._page_get_zero_copy",
        'self.storage_config.extra_config.get("interface_v1", 0)',
        "host_pools=getattr(mem_pool_host",
    ):
        assert call in source, call
    assert hicache_storage.STORAGE_BATCH_SIZE == 128


def test_the_values_that_are_handed_over_have_the_fields_we_read() -> None:
    assert {
        *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size"),
        *("is_mla_model", "model_name", "extra_config", "enable_storage_metrics", "tp_lcm_size", "should_split_heads"),
    } <= set(HiCacheStorageConfig.__dataclass_fields__)
    assert isinstance(HiCacheStorageConfig.is_storage_writer, property)
    assert {"name", "host_indices", "keys", "hit_policy"} <= set(PoolTransfer.__dataclass_fields__)
    assert {"prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"} == set(
        StorageMetrics.__dataclass_fields__
    )
    assert {"page_size", "layout", "dtype", "start_layer", "end_layer"} <= set(_parameters(HostKVCache.__init__))
    assert {"from_server_args", "get_total_num_kv_heads"} <= set(dir(ModelConfig))


def test_keys_are_chained_sha256_in_hex() -> None:
    first, second = get_hash_str([1, 2, 3, 4], None, 2)
    assert len(first) == len(second) == 64
    assert get_hash_str([3, 4], first, 2) == [second]
    assert int(first, 16) >= 0


def test_each_flag_is_adjusted_before_sglang_reads_it() -> None:
    source = inspect.getsource(pipeline.run_resolution_pipeline)
    steps = (
        "run_hook(handle_hicache_ratio_default",
        "run_hook(handle_mamba_backend",
        "run_hook(handle_mxfp8_kv_cache_compatibility",
        "run_post_process_pass(server_args, _page_size_default)",
        "run_hook(handle_hicache,",
        "run_hook(handle_speculative_decoding",
    )
    places = [source.index(step) for step in steps]
    assert places == sorted(places)
    between = source[places[2] : places[3]]
    assert between.count("run_hook(") == 1, "another step stands between ours and SGLang's default page size"
    for step in ("handle_hicache_ratio_default", "handle_mxfp8_kv_cache_compatibility", "handle_hicache"):
        assert step in resolution_hooks._OVERRIDABLE_HOOKS
