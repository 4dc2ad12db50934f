"""The table in memory says what a dict would, however the news comes in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.kernels import native
from tutti_sglang.store import table as module
from tutti_sglang.store.slots import NO_SLOT
from tutti_sglang.store.table import GONE, Loader, News, Table

EDGES = [-1 << 63, -1, 0, 1, (1 << 63) - 1]
MARKS = st.one_of(st.sampled_from(EDGES), st.integers(-20, 20))
CHANGES = st.lists(st.tuples(MARKS, st.one_of(st.just(GONE), st.integers(0, 1 << 40))), max_size=60)


def numbers(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def table_of(objects: dict[int, int], last: int = 0, piece: int = 7) -> Table:
    loader, marks = Loader(last), sorted(objects)
    for start in range(0, len(marks), piece):
        mine = marks[start : start + piece]
        assert loader.next is not None
        assert loader.next <= mine[0]
        loader.add(numbers(mine), numbers([objects[mark] for mark in mine]))
    return loader.table()


def news_of(changes: list[tuple[int, int]], first: int, to: int, end: int | None = None) -> News:
    mine = changes[first:to]
    return News(
        first, to, to if end is None else end, numbers([slot for _, slot in mine]), numbers([m for m, _ in mine])
    )


def after(objects: dict[int, int], changes: list[tuple[int, int]]) -> dict[int, int]:
    objects = objects.copy()
    for mark, slot in changes:
        objects[mark] = NO_SLOT if slot == GONE else slot
    return objects


@given(st.dictionaries(MARKS, st.integers(0, 1 << 40)), CHANGES, st.data())
def test_it_knows_what_a_dict_would_know(
    objects: dict[int, int], changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    table, asked, told = table_of(objects), [*range(-21, 22), *EDGES], 0
    while True:
        first = data.draw(st.integers(0, told))  # some of it is known already: threads look at the same time
        told = max(told, to := data.draw(st.integers(first, len(changes))))
        found = table.find(numbers(asked), news_of(changes, first, to))
        now = after(objects, changes[:told])
        assert found is not None
        assert found.tolist() == [now.get(mark, NO_SLOT) for mark in asked]
        assert table.last == told
        if data.draw(st.booleans()):
            table = table.merged()
            assert table.guess(numbers(asked))[1].tolist() == [now.get(mark, NO_SLOT) for mark in asked]
        if told == len(changes):
            return


def test_what_is_missing_in_the_news_is_noticed() -> None:
    changes = [(mark, mark) for mark in range(9)]
    table = table_of({})
    assert not table.learn(news_of(changes, 1, 3)), "the first is missing"
    assert not table.learn(News(0, 3, 3, numbers([1, 2]), numbers([1, 2]))), "one in between"
    assert not table.learn(News(0, -1, -1, numbers([]), numbers([]))), "there were more before: it is another index"
    assert table.find(numbers([1]), news_of(changes, 0, 4, end=9)) is None, "there is more to come"
    assert table.last == 4
    found = table.find(numbers([1, 8]), news_of(changes, 4, 9))
    assert found is not None
    assert found.tolist() == [1, 8]


def test_many_marks_at_once_come_back_in_their_order() -> None:
    random = np.random.default_rng(1)
    objects = dict(enumerate(random.integers(0, 1 << 40, 3000).tolist()))
    asked = random.integers(-100, 3100, 5000)
    assert table_of(objects).guess(asked)[1].tolist() == [objects.get(mark, NO_SLOT) for mark in asked.tolist()]


@pytest.mark.parametrize("library", ["with", "without"])
@pytest.mark.parametrize("crowd", [0, 1, 30, 60], ids=["hashes", "some alike", "many alike", "a handful of values"])
def test_marks_are_found_wherever_they_lie(crowd: int, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets of all sizes and at both ends, by the native library and without it."""
    if library == "without":
        monkeypatch.setattr(native, "library", lambda: None)
    random = np.random.default_rng(crowd)
    drawn = random.integers(-(1 << 63), 1 << 63, 3000, dtype=np.int64) >> np.int64(crowd)
    known, absent = np.unique(drawn)[::2], np.unique(drawn)[1::2]
    table = Table(known, np.arange(len(known)), 0)
    mixed = random.permutation(np.concatenate([known, absent]))
    for some in (known[:200], known[-200:], known[:1], absent[:200], mixed[:900], mixed, mixed[:0]):
        want = np.where(np.isin(some, known), np.searchsorted(known, some), NO_SLOT)
        assert table.guess(some)[1].tolist() == want.tolist()


def test_it_is_aged_by_changes_and_young_when_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGE_AT", 3)
    table = table_of({1: 1})
    assert not table.aged
    assert table.learn(news_of([(5, 5), (6, 6), (1, GONE)], 0, 3))
    assert table.aged
    assert not table.merged().aged
