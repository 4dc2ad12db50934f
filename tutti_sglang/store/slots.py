"""Slots as numbers: ids, ranges, which free ones to take. Pure, but for the lease of this process at the end."""

import threading

import numpy as np
import numpy.typing as npt

SEGMENT_SHIFT = 24
SLOTS_MAX = (1 << SEGMENT_SHIFT) - 1
"""Slots of one segment at most; one id of each segment stays unused, so that ranges of two never touch."""
NO_SLOT = (1 << 63) - 1

Slots = npt.NDArray[np.int64]
"""(n,) slot ids: segment << SEGMENT_SHIFT | number in the segment."""
Ranges = npt.NDArray[np.int64]
"""(m, 2) first slot id, count."""


def slot_ids(segment: int, numbers: npt.NDArray[np.int64]) -> Slots:
    """Ids of the slots `numbers` of a segment."""
    return numbers + (segment << SEGMENT_SHIFT)


def segments_of(slots: Slots) -> npt.NDArray[np.int64]:
    """(n,) segment of each slot id."""
    return slots >> SEGMENT_SHIFT


def segments_in(slots: Slots) -> list[int]:
    """Their segments, ascending. (No np.unique: it gives the GIL away, which a reader waits milliseconds for.)"""
    return sorted(set(segments_of(slots).tolist()))


def numbers_of(slots: Slots) -> npt.NDArray[np.int64]:
    """(n,) number of each slot in its segment."""
    return slots & SLOTS_MAX


def ranges_of(slots: Slots) -> Ranges:
    """The fewest ranges that hold exactly these slots, ascending; a repeated id counts once."""
    ids = np.unique(slots)
    starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    counts = np.diff(np.append(starts, len(ids)))
    return np.stack([ids[starts], counts], axis=1)


def slots_of(ranges: Ranges) -> Slots:
    """The slots of the ranges, one after the other."""
    counts = ranges[:, 1]
    before = np.cumsum(counts) - counts
    return np.repeat(ranges[:, 0] - before, counts) + np.arange(counts.sum())


def choose(free: npt.NDArray[np.bool_], group: int, want: int) -> npt.NDArray[np.int64]:
    """Which free slots of a segment to lease: ascending numbers; up to a group more than `want`, or fewer.

    Whole groups first, those in long runs before others, then the longest runs of single slots. The last whole group is
    taken whole: two owners that share one would both write short I/Os.
    """
    groups = free.reshape(-1, group)
    whole = np.repeat(groups.all(axis=1), group)
    numbers = np.flatnonzero(free)
    runs = ranges_of(numbers)
    length = np.repeat(runs[:, 1], runs[:, 1])
    order = np.lexsort((numbers, -length, ~whole[numbers]))
    taken = want
    if want < len(order) and whole[numbers[order[want - 1]]]:
        taken = -(-want // group) * group
    return np.sort(numbers[order[:taken]])


class SlotLease:
    """The free slots that this process holds in one namespace: handed out without a transaction, consecutive as far as
    there are any. Thread safe."""

    def __init__(self) -> None:
        self._ranges: Ranges = np.empty((0, 2), dtype=np.int64)
        self._lock = threading.Lock()

    @property
    def remaining(self) -> int:
        """Slots left."""
        return int(self._ranges[:, 1].sum())

    def add(self, ranges: Ranges) -> None:
        """Take what `Index.lease` granted."""
        with self._lock:
            self._ranges = ranges_of(np.concatenate([slots_of(self._ranges), slots_of(ranges)]))

    def take(self, count: int) -> Slots:
        """(≤ count,) slots: from the shortest range that holds them all, else from the longest ranges."""
        with self._lock:
            lengths = self._ranges[:, 1]
            fits = np.flatnonzero(lengths >= count)
            order = fits[[lengths[fits].argmin()]] if len(fits) else np.argsort(-lengths, kind="stable")
            taken = slots_of(self._ranges[order])[:count]
            left = np.setdiff1d(slots_of(self._ranges), taken, assume_unique=True)
            self._ranges = ranges_of(left)
            return taken

    def take_all(self) -> Slots:
        """All slots left, for `Index.give_back` at close."""
        return self.take(self.remaining)
