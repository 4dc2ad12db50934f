"""Addresses of pages are base + page x stride, for all pages at once."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tutti_sglang.kernels import native
from tutti_sglang.layout import Order, PageMap, pages_of

same_for_both = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it is the same for all inputs


@same_for_both
@given(
    st.lists(st.tuples(st.integers(0, 1 << 47), st.integers(1, 1 << 24)), min_size=1, max_size=6),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_every_row_is_base_plus_page_times_stride(tensors: list[tuple[int, int]], pages: list[int]) -> None:
    base, stride = zip(*tensors, strict=True)
    rows = PageMap(Order.LAYER, base, stride, (1,) * len(base)).rows(np.array(pages, dtype=np.int64))
    assert rows.shape == (len(pages), len(base))
    assert rows.tolist() == [[b + page * s for b, s in tensors] for page in pages]


@pytest.fixture(params=["native", "numpy"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both do the same."""
    if request.param == "numpy":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.unavailable_reason())


def slots_of(pages: list[int], page_size: int) -> np.ndarray:
    return (np.array(pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)).ravel()


@same_for_both
@given(st.lists(st.integers(0, 1000), max_size=20), st.sampled_from([1, 16, 64]))
def test_token_slots_become_page_numbers(pages: list[int], page_size: int) -> None:
    assert pages_of(slots_of(pages, page_size), page_size, 1001).tolist() == pages


@same_for_both
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from([2, 16]), st.data())
def test_slots_that_are_no_pages_of_the_pool_are_a_bug_of_the_caller(
    pages: list[int], page_size: int, data: st.DataObject
) -> None:
    slots = slots_of(pages, page_size)
    slots[data.draw(st.integers(0, len(slots) - 1))] += data.draw(st.sampled_from([-(1 << 40), -1, 1, page_size]))
    with pytest.raises(AssertionError):
        pages_of(slots, page_size, 10)


def test_half_a_page_and_a_page_beyond_the_end_are_bugs_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        pages_of(np.arange(10), 16, 10)
    with pytest.raises(AssertionError):
        pages_of(slots_of([10], 16), 16, 10)
    with pytest.raises(AssertionError):
        pages_of(slots_of([-1], 16), 16, 10)
