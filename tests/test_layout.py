"""Addresses of pages are base + page x stride, for all pages at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.layout import Order, PageMap, pages_of


@given(
    st.lists(st.tuples(st.integers(0, 1 << 47), st.integers(1, 1 << 24)), min_size=1, max_size=6),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_every_row_is_base_plus_page_times_stride(tensors: list[tuple[int, int]], pages: list[int]) -> None:
    base, stride = zip(*tensors, strict=True)
    rows = PageMap(Order.LAYER, base, stride, (1,) * len(base)).rows(np.array(pages, dtype=np.int64))
    assert rows.shape == (len(pages), len(base))
    assert rows.tolist() == [[b + page * s for b, s in tensors] for page in pages]


@given(st.lists(st.integers(0, 1000), max_size=20), st.sampled_from([1, 16, 64]))
def test_token_slots_become_page_numbers(pages: list[int], page_size: int) -> None:
    indices = (np.array(pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)).ravel()
    assert pages_of(indices, page_size).tolist() == pages


def test_half_a_page_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        pages_of(np.arange(10), 16)
