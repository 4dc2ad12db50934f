"""POOL: a page of several pools is restored as far as all of them have it, and each pool says what came."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tests.integration.host_pools import fill, mha_pool, slots
from tests.regressions.test_key import keys
from tutti_sglang.integration.calls import key_bytes

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
