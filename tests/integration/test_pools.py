"""Page maps of real host pools, against each pool's own get_page_buffer_meta."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.host_pools import fill, mha_pool, mla_pool, slots
from tutti_sglang.errors import UnsupportedError
from tutti_sglang.integration.pools import PoolView, view_of
from tutti_sglang.layout import Order

PAGES = [5, 0, 16, 3]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2]
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


def _bytes(view: PoolView, pool: Any, pages: list[int]) -> list[bytes]:
    numbers = view.numbers(slots(pool, pages), len(pages))
    rows = np.concatenate([each.rows(numbers) for each in view.maps], axis=1)
    sizes = [size for each in view.maps for size in each.sizes]
    return [b"".join(ctypes.string_at(int(a), s) for a, s in zip(row, sizes, strict=True)) for row in rows]


def _meta_bytes(pool: Any, pages: list[int], groups: int = 1) -> list[bytes]:
    indices = slots(pool, pages)
    meta = pool.get_page_buffer_meta if groups == 1 else lambda i: pool.get_split_heads_page_buffer_meta(i, groups)
    pointers, sizes = meta(indices)
    per_page = len(pointers) // len(pages)
    parts = [ctypes.string_at(p, s) for p, s in zip(pointers, sizes, strict=True)]
    return [b"".join(parts[i : i + per_page]) for i in range(0, len(parts), per_page)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mha_addresses_are_the_pools_own(layout: str, page_size: int, dtype: torch.dtype) -> None:
    pool = mha_pool(layout, page_size, dtype)
    fill(pool, 1)
    view = view_of(pool)
    if layout == "page_first_direct":  # the pool names K of all layers, then V; we name the tensors of each layer
        pointers, sizes = pool.get_page_buffer_meta(slots(pool, PAGES))
        rows = view.maps[0].rows(np.array(PAGES))
        part = sizes[0] // pool.layer_num
        expected = np.array(pointers, np.uint64).reshape(-1, 1, 2) + np.arange(pool.layer_num).reshape(1, -1, 1) * part
        assert np.array_equal(rows, expected.reshape(len(PAGES), -1))
        assert set(view.maps[0].sizes) == {part}
    else:
        assert _bytes(view, pool, PAGES) == _meta_bytes(pool, PAGES)
    assert view.page_bytes == pool.get_size_per_token() * page_size
    assert view.layers == (0, pool.layer_num)
    assert view.sharded


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_mla_addresses_are_the_pools_own(layout: str, page_size: int) -> None:
    pool = mla_pool(layout, page_size, torch.bfloat16)
    fill(pool, 1)
    view = view_of(pool)
    assert _bytes(view, pool, PAGES) == _meta_bytes(pool, PAGES)
    assert not view.sharded
    assert len(view.maps[0].sizes) == (1 if layout == "page_first" else pool.layer_num)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_k_and_v_of_different_width(layout: str) -> None:
    pool = mha_pool(layout, 16, v_width=4)
    fill(pool, 1)
    view = view_of(pool)
    ours, theirs = _bytes(view, pool, PAGES), _meta_bytes(pool, PAGES)
    assert [sorted(page) for page in ours] == [sorted(page) for page in theirs]
    if layout == "page_first":
        assert ours == theirs
    assert len(set(view.maps[0].sizes)) == 2


@pytest.mark.parametrize("groups", [2, 4])
def test_head_groups_are_the_pools_own(groups: int) -> None:
    pool = mha_pool("page_head", 16)
    fill(pool, 1)
    view = view_of(pool, groups)
    assert len(view.maps) == groups
    assert all(each.order is Order.HEAD for each in view.maps)
    assert _bytes(view, pool, PAGES) == _meta_bytes(pool, PAGES, groups)


@pytest.mark.parametrize("make", [mha_pool, mla_pool])
def test_layer_major_layouts_name_the_same_tensors(make: Any) -> None:
    one, other = make("layer_first"), make("page_first_direct")
    for index in range(17):
        page = torch.rand_like(one.get_data_page(index * 16).to(torch.float32)).to(one.dtype)
        one.set_from_flat_data_page(index * 16, page)
        other.set_from_flat_data_page(index * 16, page)
    first, second = view_of(one), view_of(other)
    assert first.maps[0].order is second.maps[0].order is Order.LAYER
    assert first.maps[0].sizes == second.maps[0].sizes
    assert _bytes(first, one, PAGES) == _bytes(second, other, PAGES)


def test_slots_that_are_not_whole_pages_are_a_bug() -> None:
    pool = mha_pool(page_size=4)
    view = view_of(pool)
    good = slots(pool, [1, 2])
    assert view.numbers(good, 2).tolist() == [1, 2]
    for bad in (good[:-1], good + 1, torch.cat([good[:4], good[4:].flip(0)]), good + 4 * 16, good - 8):
        with pytest.raises(AssertionError):
            view.numbers(bad, 2)
    with pytest.raises(AssertionError):
        view.numbers(good, 1)


def test_the_slots_are_copied() -> None:
    pool = mha_pool(page_size=4)
    given = slots(pool, [1, 2])
    numbers = view_of(pool).numbers(given, 2)
    given.zero_()
    assert numbers.tolist() == [1, 2]


def test_the_memory_outlives_the_pool() -> None:
    pool = mha_pool()
    fill(pool, 1)
    view = view_of(pool)
    before = _bytes(view, pool, [3])
    pool.destroy()
    assert pool.kv_buffer is None
    assert _bytes(view, pool, [3]) == before


class _Strange:
    """A pool kind that nobody knows."""


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"_Strange cannot be kept.*MHATokenToKVPoolHost.*MLATokenToKVPoolHost"):
        view_of(_Strange())
    pool = mha_pool()
    pool.layout = "page_unified"
    with pytest.raises(UnsupportedError, match=r"page_unified.*page_first_direct"):
        view_of(pool)
    with pytest.raises(UnsupportedError, match="cut into 3 groups"):
        view_of(mha_pool("page_head"), 3)
    pool.destroy()
    with pytest.raises(UnsupportedError, match="holds no memory"):
        view_of(pool)
    mla = mla_pool()
    mla.layout = "page_head"
    with pytest.raises(UnsupportedError, match="page_head"):
        view_of(mla)
