"""Which object lies in which slot, in memory of this process: a search in arrays instead of one in a B-tree per key.

The index stays the truth. Each look asks it, in the one statement that tells the epoch too, what has changed since the
table was last right; while that cannot be told, the B-tree answers, and a table that missed too much is made anew in
the background. So what a table says is what the index says, as of one moment.
"""

import ctypes
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.kernels import native
from tutti_sglang.store.slots import NO_SLOT, Slots

Marks = npt.NDArray[np.int64]
"""(n,) marks as SQLite's integers."""

GONE = -1
"""The slot of a change that took an object away."""

MERGE_AT = 1 << 15
"""Changes from which it pays to make the arrays anew."""

_SORTED_FROM = 1024
"""Marks from which sorting them pays: neighbours share cache lines."""

_CROWD = 3
"""Log2 of how many marks a bucket has on average: a cache line."""


class News(NamedTuple):
    """Changes of the index in their order, after number `last` up to `newest` or a little less: (n,) slots (GONE: the
    object is gone) and marks. `end`: the number of the index's newest change."""

    last: int
    newest: int
    end: int
    slots: Slots
    marks: Marks

    @property
    def whole(self) -> bool:
        """None is missing in between."""
        return len(self.slots) == len(self.marks) == self.newest - self.last


class _Native(ctypes.Structure):
    """`struct tutti_table` of kernels/host/abi.hpp."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("marks", "slots", "starts")), ("shift", ctypes.c_uint32))


class _Buckets:
    """Where in ascending marks those begin whose highest bits are equal: a mark is found there at once, while a binary
    search waits for memory a dozen times. One call that keeps the GIL: numpy would give it away at every step."""

    def __init__(self, marks: Marks, slots: Slots) -> None:
        self._library = native.library()
        bits = max(1, len(marks).bit_length() - _CROWD)
        firsts = np.arange(-(1 << bits >> 1), 1 << bits >> 1, dtype=np.int64) << (64 - bits)
        starts = np.append(np.searchsorted(marks, firsts), len(marks))
        self._kept = arrays = [np.ascontiguousarray(each, dtype=np.int64) for each in (marks, slots, starts)]
        self._native = _Native(*(each.ctypes.data for each in arrays), 64 - bits)
        self._address = ctypes.addressof(self._native)

    def find(self, marks: Marks) -> Slots | None:
        """(n,) the slots, NO_SLOT where there is none; None without the native library."""
        if self._library is None:
            return None
        marks, found = np.ascontiguousarray(marks), np.empty(len(marks), dtype=np.int64)
        self._library.tutti_find(self._address, marks.ctypes.data, len(marks), NO_SLOT, found.ctypes.data)
        return found


class Table:
    """Thread safe."""

    def __init__(self, marks: Marks, slots: Slots, last: int) -> None:
        """Of the objects that were there after change `last`, or later; `marks` ascending."""
        self._marks, self._slots = marks, slots
        self._buckets = _Buckets(marks, slots)
        self._since: dict[int, int] = {}
        self._last = last
        self._lock = threading.Lock()

    @property
    def last(self) -> int:
        """The number of the last change that it knows."""
        return self._last

    @property
    def aged(self) -> bool:
        """It should be `merged`."""
        return len(self._since) >= MERGE_AT

    def guess(self, marks: Marks) -> tuple[int, Slots]:
        """The number of the last change that is known here, and (n,) slots as of then."""
        with self._lock:
            return self._last, self._find(marks)

    def find(self, marks: Marks, news: News) -> Slots | None:
        """(n,) slots as of the end of the news; None where that cannot be told."""
        with self._lock:
            return self._find(marks) if self._learn(news) and self._last >= news.end else None

    def learn(self, news: News) -> bool:
        """Take note of changes, some of which may be known. False: too much was missed; it is of no use any more."""
        with self._lock:
            return self._learn(news)

    def merged(self) -> "Table":
        """The same with all changes in the arrays; what changes meanwhile is news for it."""
        with self._lock:
            last, since = self._last, self._since.copy()
        changed = np.fromiter(since.keys(), np.int64, len(since))
        slots = np.fromiter(since.values(), np.int64, len(since))
        kept = np.ones(len(self._marks), dtype=np.bool_)
        at, known = self._search(changed)
        kept[at[known]] = False
        there = slots != NO_SLOT
        marks = np.concatenate([self._marks[kept], changed[there]])
        order = np.argsort(marks)
        return Table(marks[order], np.concatenate([self._slots[kept], slots[there]])[order], last)

    def _learn(self, news: News) -> bool:
        known = self._last - news.last
        if known < 0 or not news.whole:
            return False
        if news.newest > self._last:
            slots = np.where(news.slots == GONE, NO_SLOT, news.slots)[known:]
            self._since.update(zip(news.marks[known:].tolist(), slots.tolist(), strict=True))
            self._last = news.newest
        return True

    def _find(self, marks: Marks) -> Slots:
        found = self._buckets.find(marks)
        if found is None:
            order = np.argsort(marks) if len(marks) >= _SORTED_FROM else np.arange(len(marks))
            at, known = self._search(marks[order])
            found = np.full(len(marks), NO_SLOT)
            found[order[known]] = self._slots[at[known]]
        if self._since.keys().isdisjoint(names := marks.tolist()):
            return found
        return np.fromiter(map(self._since.get, names, found.tolist()), np.int64, len(marks))

    def _search(self, marks: Marks) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Where in the arrays, and whether there."""
        at = np.searchsorted(self._marks, marks)
        if not len(self._marks):
            return at, np.zeros(len(marks), dtype=np.bool_)
        return at, self._marks[np.minimum(at, len(self._marks) - 1)] == marks


class Loader:
    """A table in the making, from pieces with ascending marks. Changes after `last`, the newest one before the first
    piece was read, are news for it."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._marks: list[Marks] = []
        self._slots: list[Slots] = []
        self.count = 0

    def add(self, marks: Marks, slots: Slots) -> None:
        """A piece."""
        self._marks.append(marks)
        self._slots.append(slots)
        self.count += len(marks)

    @property
    def next(self) -> int | None:
        """The least mark that the next piece may have; None after the greatest."""
        if not self.count:
            return -1 << 63
        last = int(self._marks[-1][-1])
        return last + 1 if last < NO_SLOT else None

    def table(self) -> Table:
        """Once there are no more pieces."""
        none = np.empty(0, dtype=np.int64)
        return Table(np.concatenate([none, *self._marks]), np.concatenate([none, *self._slots]), self._last)
