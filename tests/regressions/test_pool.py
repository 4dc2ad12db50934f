"""POOL: a page of several pools is restored as far as all of them have it, and each pool says what came."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from tests.integration import side_pools as makers
from tests.integration.host_pools import fill, mha_pool, mla_pool, slots
from tests.integration.side_pools import page_bytes, randomize
from tests.regressions.test_key import keys
from tutti_sglang.integration.calls import key_bytes
from tutti_sglang.integration.hooks import HOOKS
from tutti_sglang.metrics import process_metrics

Open = Callable[..., Any]


def test_a_part_that_went_between_lookup_and_get_is_told_for_its_pool(opened: Open) -> None:
    """B28: elsewhere index pages were gone when they were read, the shortfall was logged, and the prefix was used."""
    pool, side = mha_pool(), mha_pool("page_first", heads=2)
    fill(pool, 1)
    fill(side, 2)
    backend = opened(pool)
    backend.register_mem_host_pool_v2(side, PoolName.INDEXER)
    names, pages = keys(8), list(range(8))
    both = [
        PoolTransfer(PoolName.KV, slots(pool, pages), keys=names),
        PoolTransfer(PoolName.INDEXER, slots(side, pages), keys=names, hit_policy=PoolHitPolicy.ALL_PAGES),
    ]
    assert backend.batch_set_v2(both) == {PoolName.KV: [True] * 8, PoolName.INDEXER: [True] * 8}
    backend.flushed()
    assert backend.batch_exists_v2(names, both[1:]).kv_hit_pages == 8
    stored = backend._tier._pools[PoolName.INDEXER]
    index, number = backend._tier.store._parts.index, stored._ids[0]
    records = index.lookup(number, key_bytes(names[5:6])).records
    assert index.delete(number, key_bytes(names[5:6]), records["slot"].astype(np.int64)).all()
    got = backend.batch_get_v2(both)
    assert got == {PoolName.KV: [True] * 8, PoolName.INDEXER: [True] * 5 + [False] + [True] * 2}
    assert backend.batch_exists_v2(names, both[1:]).kv_hit_pages == 5


def test_a_draft_is_kept_with_its_model(opened: Open) -> None:
    """B32: elsewhere the draft's cache held anything after a restore, and nothing it proposed was accepted."""
    pool, draft, index = mla_pool(page_size=64), mla_pool(page_size=64, layers=1), makers.dsa_indexer_pool(skipped=2)
    for seed, each in enumerate((pool, draft, index)):
        randomize(each, seed)
    names, pages = keys(4), [3, 0, 16, 5]

    def transfers(**where: list[int]) -> list[PoolTransfer]:
        pools = {PoolName.KV: pool, PoolName.DRAFT: draft, PoolName.DRAFT_INDEXER: index}
        places = where.get("pages", pages)
        return [PoolTransfer(name, slots(each, places), keys=names) for name, each in pools.items()]

    def attach() -> Any:
        backend = opened(pool, is_mla_model=True)
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)  # SGLang makes it when the tier serves already
        backend.register_mem_host_pool_v2(index, PoolName.DRAFT_INDEXER)
        return backend

    written = [[page_bytes(each, page) for page in pages] for each in (pool, draft, index)]
    first = attach()
    assert all(all(done) for done in first.batch_set_v2(transfers()).values())
    first.close()
    second = attach()
    assert second.batch_exists_v2(names, transfers()[1:]).restorable_prefix_pages == [1, 2, 3, 4]
    assert all(all(done) for done in second.batch_get_v2(transfers(pages=[7, 8, 9, 10])).values())
    assert [[page_bytes(each, page) for page in (7, 8, 9, 10)] for each in (pool, draft, index)] == written


def test_each_rank_keeps_its_own_part_of_a_draft_beside_replicated_kv(opened: Open) -> None:
    """B32: one rank writes the KV; of a draft with heads it has only its own."""
    (hook,) = [each for each in HOOKS if each.target.endswith("HybridCacheController.should_backup")]
    original = getattr(HybridCacheController.should_backup, "__wrapped__", HybridCacheController.should_backup)
    names, drafts = keys(2), [mha_pool(heads=2, layers=1), mha_pool(heads=2, layers=1)]
    ranks = [opened(mla_pool(), tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2)]
    for rank, (backend, draft) in enumerate(zip(ranks, drafts, strict=True)):
        fill(draft, rank)
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        backend.register_mem_host_pool_v2(mla_pool(), PoolName.INDEXER)
        controller = SimpleNamespace(backup_skip=rank > 0, storage_backend_type="tutti", storage_backend=backend)
        asked = {name: hook.function(original, controller, PoolTransfer(name)) for name in PoolName}
        assert asked[PoolName.DRAFT]
        assert asked[PoolName.MAMBA]
        assert asked[PoolName.INDEXER] is (rank == 0), "the same bytes on all ranks"
        assert all(backend.batch_set_v2([PoolTransfer(PoolName.DRAFT, slots(draft, [0, 1]), keys=names)])["draft"])
    for backend, draft in zip(ranks, drafts, strict=True):
        assert all(backend.batch_get_v2([PoolTransfer(PoolName.DRAFT, slots(draft, [6, 7]), keys=names)])["draft"])
        assert [page_bytes(draft, page) for page in (6, 7)] == [page_bytes(draft, page) for page in (0, 1)]


def test_the_pool_that_lets_nothing_be_restored_is_named(opened: Open) -> None:
    """B36: elsewhere a store of 36 GB had no hit after a restart, and no number said which pool was missing."""
    pool, window, state = mha_pool(), mha_pool("page_first", heads=2), makers.mamba_pool()
    names, pages = keys(8), list(range(8))

    def attach() -> Any:
        backend = opened(pool, extra={"segment_size": "8MiB"})
        backend.register_mem_host_pool_v2(window, PoolName.SWA)
        backend.register_mem_host_pool_v2(state, PoolName.MAMBA)
        return backend

    first = attach()
    assert all(first.batch_set_v1(names, slots(pool, pages)))
    assert all(first.batch_set_v2([PoolTransfer(PoolName.SWA, slots(window, pages), keys=names)])["swa"])
    first.close()
    second = attach()
    asked = [
        PoolTransfer(PoolName.SWA, keys=names[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        PoolTransfer(PoolName.MAMBA, keys=names[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    metrics = process_metrics()

    def counted() -> list[float]:
        found = [metrics.value("tutti_pool_pages", pool=p, op="lookup", outcome="yes") for p in ("kv", "swa", "mamba")]
        return [*found, *(metrics.value("tutti_withheld_pages", pool=p) for p in ("swa", "mamba"))]

    before = counted()
    result = second.batch_exists_v2(names, asked)
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {PoolName.KV: 8, PoolName.SWA: 8})
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [8, 8, 0, 0, 8]
    assert second.batch_get_v1(names, slots(pool, pages)) == [True] * 8
    assert metrics.value("tutti_pool_pages", pool="mamba", op="lookup", outcome="no") >= 8
