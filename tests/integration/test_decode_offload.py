"""Decode offload of prefill/decode disaggregation: SGLang's manager over the base controller, on two ranks, and a
prefill server's tree that finds what the decode server stored (B64)."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.gloo import PAGE, Rank, on_ranks
from tutti_sglang.integration.cpu_model import built_in_model

PROMPT = [5 + n % 11 for n in range(4 * PAGE)]
REPLY = [60 + n % 13 for n in range(4 * PAGE + 1)]
"""The last token of a reply has no KV yet."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _scheduler() -> None:
    """Once: this import takes half a minute on a small machine, and the ranks fork from here."""
    importlib.import_module("sglang.srt.disaggregation.decode_kvcache_offload_manager")


class _Request:
    """A request that the decode server has generated a reply for; its KV lies in `row` of the request pool."""

    extra_key = cache_salt = lock = None
    rid = "decode"

    def __init__(self, row: int) -> None:
        self.origin_input_ids, self.output_ids = PROMPT, REPLY
        self.kv = SimpleNamespace(
            req_pool_idx=row,
            cache_protected_len=0,
            kv_allocated_len=len(PROMPT + REPLY) - 1,
            mark_kv_released=lambda: None,
        )

    def finished(self) -> bool:
        return True


def _manager(rank: Rank, store: Path, **extra: Any) -> Any:
    """The manager as the decode scheduler makes it: its settings are the text of the launch, reserved keys included."""
    from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
    from sglang.srt.runtime_context import get_context

    text = json.dumps(json.loads(rank.settings(store)) | {"hicache_storage_pass_prefix_keys": False} | extra)
    get_context().override("test", hicache_storage_backend="tutti", hicache_storage_backend_extra_config=text)
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 1024, dtype=torch.int32), free=lambda request: None)
    tree = SimpleNamespace(free_kv_row=lambda *_: None, unlock=lambda *_: None)
    return DecodeKVCacheOffloadManager(pool, rank.allocator, rank.parallel.tp_group.cpu_group, tree)


def _offload(manager: Any, rank: Rank) -> None:
    tokens = PROMPT + REPLY[:-1]
    slots = rank.allocator.alloc(len(tokens))
    rank.write(slots, tokens)
    manager.req_to_token_pool.req_to_token[1, : len(tokens)] = slots
    assert manager.offload_kv_cache(_Request(1))
    for _ in range(10000):
        manager.check_offload_progress()
        waits = torch.tensor([len(manager.ongoing_offload) + len(manager.ongoing_backup)])
        torch.distributed.all_reduce(waits)
        if not waits.item():
            return
    raise AssertionError("the offload does not end")


@pytest.mark.parametrize("mla", [False, True], ids=["shards", "replicas"])
def test_a_prefill_server_finds_what_a_decode_server_offloaded(mla: bool, disk: Path) -> None:
    def decode(rank: Rank) -> str:
        manager = _manager(rank, disk / "store")
        _offload(manager, rank)
        controller = manager.cache_controller
        name = str(controller.page_set_func.__name__)
        rank.decode = manager
        return name

    def stop(rank: Rank) -> list[bool]:
        """The decode scheduler's end: host memory goes, and nothing of ours may touch it any more."""
        from tutti_sglang.integration.live import live_backends

        rank.decode.release_host_resources()
        return [backend.closed for backend in live_backends()]

    def prefill(rank: Rank) -> tuple[int, int]:
        """The prompt's pages are the prefill server's own; a longer prompt finds the reply's after them."""
        rank.flush()
        assert rank.attach(disk / "store") == ""
        rank.compute(PROMPT)
        rank.flush()
        return rank.ask(PROMPT), rank.ask(PROMPT + REPLY[:-1])

    def one_fails(rank: Rank) -> str:
        rank.detach()
        (disk / "file").touch()
        try:
            _manager(rank, disk / ("file" if rank.number else "store"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    answers = on_ranks(built_in_model(), 2, decode, stop, prefill, one_fails, mla=mla, tp_size=2)
    assert answers[0] == ["_page_set_zero_copy"] * 2
    assert answers[1] == [[], []]
    assert answers[2] == [(len(PROMPT), len(PROMPT + REPLY[:-1]) - len(PROMPT))] * 2
    assert "Rank 1 cannot attach" in answers[3][0]
    assert "file" in answers[3][1]
