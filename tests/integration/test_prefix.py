"""Hit policies: how many pages of a prefix every pool lets be restored."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tutti_sglang.integration.prefix import allowed, leading


def _transfer(policy: PoolHitPolicy, window: int) -> PoolTransfer:
    return PoolTransfer(name=PoolName.SWA, keys=["k"] * window, hit_policy=policy)


@given(st.lists(st.booleans(), max_size=20), st.integers(0, 8))
def test_policies_are_those_of_sglangs_file_backend(pages: list[bool], window: int) -> None:
    found = np.array(pages, np.bool_)
    first = pages.index(False) if False in pages else len(pages)
    assert leading(found) == first
    everything = allowed(found, _transfer(PoolHitPolicy.ALL_PAGES, window))
    assert everything.tolist() == [p <= first for p in range(1, len(pages) + 1)]
    trailing = allowed(found, _transfer(PoolHitPolicy.TRAILING_PAGES, window))
    expected = [all(pages[max(0, p - max(1, window)) : p]) for p in range(1, len(pages) + 1)]
    assert trailing.tolist() == expected
