"""SGLang's own controller of models with several pools, its threads and its queues, against the backend: what is backed
up comes back byte by byte in every pool, and as far as all of them have it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

from tests.integration import side_pools as makers
from tests.integration.host_pools import mha_device, mha_pool, mla_device, mla_pool, slots
from tests.integration.side_pools import page_bytes, randomize

PAGES = 6
WINDOW = {PoolName.SWA: 2, PoolName.MAMBA: 1, PoolName.DEEPSEEK_V4_C4_STATE: 2}
"""Pages at the end of a prefix that a pool must have; of the other pools, all."""


class Model:
    """`pools`: the anchor first; `derived`: pools whose rows are those of another; `device`: what SGLang takes for the
    model's memory."""

    def __init__(self, pools: dict[PoolName, Any], derived: dict[PoolName, PoolName], device: Any) -> None:
        self.pools, self.derived, self.device = pools, derived, device

    def transfers(self, keys: list[str], pages: list[int]) -> list[PoolTransfer]:
        """Of the side pools, for a prefix of `keys` that lies in `pages` of each."""
        found = []
        for name, pool in list(self.pools.items())[1:]:
            count = WINDOW.get(name, len(keys))
            source = self.derived.get(name)
            found.append(
                PoolTransfer(
                    name,
                    None if source else slots(pool, pages[-count:]),
                    keys=keys[-count:],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES if name in WINDOW else PoolHitPolicy.ALL_PAGES,
                    indices_from_pool=source,
                )
            )
        return found


def _hybrid() -> Model:
    pools = {
        PoolName.KV: mha_pool(),
        PoolName.SWA: mha_pool("page_first", heads=2),
        PoolName.MAMBA: makers.mamba_pool(),
    }
    return Model(pools, {}, mha_device())


def _sparse() -> Model:
    pools = {
        PoolName.KV: mla_pool(page_size=64),
        PoolName.INDEXER: makers.dsa_indexer_pool(),
        PoolName.DRAFT: mla_pool(page_size=64, layers=1),
        PoolName.DRAFT_INDEXER: makers.dsa_indexer_pool(skipped=2),
    }
    return Model(pools, dict.fromkeys(list(pools)[1:], PoolName.KV), mla_device(64))


def _compressed() -> Model:
    pools = {
        PoolName.KV: makers.logical_pool(),
        PoolName.DEEPSEEK_V4_C4: makers.deepseek_v4_pool(),
        PoolName.SWA: makers.deepseek_v4_pool("layer_first", item_bytes=300),
        PoolName.DEEPSEEK_V4_C4_STATE: makers.deepseek_v4_state_pool("layer_first"),
    }
    derived = {PoolName.DEEPSEEK_V4_C4: PoolName.KV, PoolName.DEEPSEEK_V4_C4_STATE: PoolName.SWA}
    return Model(
        pools, derived, mla_device(64)
    )  # what is told from replicated KV by its class: SGLang's own needs CUDA


def _four_bit() -> Model:
    pools = {PoolName.KV: makers.nvfp4_main_pool(), PoolName.INDEXER: makers.nvfp4_index_pool()}
    return Model(pools, {PoolName.INDEXER: PoolName.KV}, mha_device(128))


MODELS = {"hybrid": _hybrid, "sparse": _sparse, "compressed": _compressed, "four_bit": _four_bit}


class Served:
    """A controller with the backend attached by the factory's `dynamic` route."""

    def __init__(self, model: Model, directory: Path) -> None:
        self.model = model
        self.page_size = next(iter(model.pools.values())).page_size
        entries = [
            PoolEntry(name, pool, None, lambda layer: layer, is_primary_index_anchor=not place)
            for place, (name, pool) in enumerate(model.pools.items())
        ]
        self.controller = HybridCacheController(
            SimpleNamespace(get_kvcache=lambda: model.device),
            HostPoolGroup(entries),
            self.page_size,
            None,
            threading.Event(),
            io_backend="direct",
        )
        settings = {
            **{"backend_name": "tutti", "module_path": "tutti_sglang.integration.hicache"},
            **{"class_name": "TuttiHiCacheStorage", "storage_dirs": [str(directory)], "max_size": "64MiB"},
            **{"segment_size": "8MiB", "min_free_space": "1MiB", "staging_size": "16MiB"},
        }
        self.controller.attach_storage_backend(
            "dynamic", model_name="m", storage_backend_extra_config=settings, host_pools=entries
        )

    def backup(self, tokens: list[int], pages: list[int]) -> int:
        """Store a prefix that lies in `pages` of each pool; the tokens that SGLang takes for stored."""
        keys = get_storage_hash_str(tokens, None, page_size=self.page_size)
        anchor = next(iter(self.model.pools.values()))
        self.controller.write_storage(
            slots(anchor, pages), tokens, hash_value=keys, extra_pools=self.model.transfers(keys, pages)
        )
        return int(self.controller.ack_backup_queue.get(timeout=60).completed_tokens)

    def prefetch(self, tokens: list[int], pages: list[int]) -> tuple[int, dict[str, int]]:
        """Read a prefix into `pages`: tokens of KV that came, and pages of the pools that have windows."""
        keys = get_storage_hash_str(tokens, None, page_size=self.page_size)
        transfers = self.model.transfers(keys, pages)
        operation = self.controller.prefetch(CacheRequestHandle("r", 0), tokens, extra_pools=transfers)
        found = self.controller.prefetch_hit_queue.get(timeout=60)
        count = found.storage_hit_count // self.page_size
        if not count:
            return 0, {}
        anchor = next(iter(self.model.pools.values()))
        found.host_indices = slots(anchor, pages[:count])
        for transfer in transfers:
            if transfer.host_indices is not None:
                length = WINDOW.get(transfer.name, count)
                transfer.host_indices = slots(self.model.pools[transfer.name], pages[max(0, count - length) : count])
        self.controller.prefetch_buffer.put(operation)
        completed, windows = 0, dict[str, int]()
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=60)).completed_req:
            completed = max(completed, ack.completed_tokens or 0)
            windows |= ack.pool_hits or {}
        return completed, {each: pages for each, pages in windows.items() if pages}


@pytest.fixture
def serve(disk: Path) -> Iterator[Callable[[str], Served]]:
    """A model, with nothing in its pools, on the one store; what was served before is detached."""
    running: list[Served] = []

    def start(name: str) -> Served:
        stop()
        running.append(Served(MODELS[name](), disk / "store"))
        return running[-1]

    def stop() -> None:
        while running:
            running.pop().controller.detach_storage_backend()

    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, **ranks):
        yield start
        stop()


@pytest.mark.parametrize("name", MODELS)
def test_what_the_controller_backs_up_it_prefetches_byte_by_byte(name: str, serve: Callable[[str], Served]) -> None:
    served = serve(name)
    model, size = served.model, served.page_size
    tokens = list(range(PAGES * size))
    for seed, pool in enumerate(model.pools.values()):
        randomize(pool, seed)
    written = {each: [page_bytes(pool, page) for page in range(PAGES)] for each, pool in model.pools.items()}
    assert served.backup(tokens, list(range(PAGES))) == PAGES * size
    served = serve(name)
    places = [9, 8, 7, 12, 11, 10]
    completed, windows = served.prefetch([*tokens, *range(size)], [*places, 13])
    assert completed == PAGES * size
    assert windows == {each: WINDOW[each] for each in served.model.pools if each in WINDOW}
    for each, pool in served.model.pools.items():
        count = WINDOW.get(each, PAGES)
        got = [page_bytes(pool, page) for page in places[-count:]]
        assert got == written[each][-count:], each


@pytest.mark.parametrize("name", MODELS)
def test_no_more_is_prefetched_than_every_pool_has(name: str, serve: Callable[[str], Served]) -> None:
    served = serve(name)
    tokens = list(range(PAGES * served.page_size))
    for pages in range(1, PAGES + 1):  # nodes of one page each: every length has its windows
        assert served.backup(tokens[: pages * served.page_size], list(range(pages)))
    keys = get_storage_hash_str(tokens, None, page_size=served.page_size)
    backend = served.controller.storage_backend
    for each in list(served.model.pools)[1:]:
        assert served.prefetch(tokens, list(range(7, 13)))[0] == PAGES * served.page_size
        stored = backend._tier._pools[each]
        backend.flushed()
        index = backend._tier.store._parts.index
        key = bytes.fromhex(keys[-1])
        records = index.lookup(stored._ids[0], key).records
        assert index.delete(stored._ids[0], key, records["slot"].astype("int64")).all()
        assert served.prefetch(tokens, list(range(7, 13)))[0] == (PAGES - 1) * served.page_size, each
        assert served.backup(tokens, list(range(PAGES)))
