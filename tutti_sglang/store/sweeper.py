"""Evicts: moves the hands of the clocks over the slots of a store. The policy is `eviction.py`."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.store.allocation import SegmentRow
from tutti_sglang.store.clock import Clock
from tutti_sglang.store.eviction import HITS_MAX, Hits, Sweep, aged, window_size
from tutti_sglang.store.index import Index, Occupants
from tutti_sglang.store.pins import Pins
from tutti_sglang.store.slots import Slots, slot_ids

_PIECE = 4096
"""Slots that are read from the index at once."""
_TURNS = HITS_MAX + 2
"""After so many turns of the hand there is a cold object, if there is any."""
_PINNED_TURNS, _LATEST_TURNS = _TURNS + 1, _TURNS + 2
"""After so many, one of those that were pinned; of those that were written last."""


class Stretch(NamedTuple):
    """Consecutive slots of a segment, `first` to `last` - 1."""

    row: SegmentRow
    first: int
    last: int


class _Window(NamedTuple):
    """Where the hand is. `sweep`: what is cold there; `keys`: (n, 32) of its slots; `places`: (n,) where they lie in
    the window."""

    stretches: list[Stretch]
    sweep: Sweep
    keys: npt.NDArray[np.uint8]
    places: npt.NDArray[np.int64]


def stretches(segments: Iterable[SegmentRow], start: int, end: int) -> list[Stretch]:
    """The slots `start` to `end` - 1 of all slots, counted segment after segment; what lies outside is left out."""
    found, base = [], 0
    for row in segments:
        first, last = max(start - base, 0), min(end - base, row.slots)
        if first < last:
            found.append(Stretch(row, first, last))
        base += row.slots
    return found


class Sweeper:
    """One per process, for one thread. Processes sweep different windows; one that dies leaves its own to the next
    turn."""

    def __init__(self, index: Index, clock: Clock, pins: Pins) -> None:
        self._index = index
        self._clock = clock
        self._pins = pins
        self._windows: dict[int, _Window] = {}

    def make_room(self, namespace: int, count: int, segments: Iterable[SegmentRow], spare: bool = False) -> int:
        """Evict `count` objects of a namespace from those of `segments` that are its own; how many went: fewer where
        there are not so many. What is pinned goes only when all the rest is hot, then what was written last, up to half
        of the slots that are not pinned, and with `spare` neither. Their slots settle before they can be leased.
        StoreError."""
        mine = sorted((row for row in segments if row.namespace == namespace), key=lambda row: row.id)
        total = sum(row.slots for row in mine)
        latest = self._pins.latest(namespace, (total - self._claims(mine, total)) // 2)
        self._clock.flush()
        gone = seen = reached = 0
        while gone < count and mine and seen <= (_TURNS if spare else _LATEST_TURNS) * total:
            window = self._windows.get(namespace)
            if window is None or not len(window.sweep):
                step = window_size(total)
                seen += step
                window = self._windows[namespace] = self._enter(namespace, mine, step, total)
            for turns in (_TURNS, _PINNED_TURNS):  # what was of no use until then is of none for the rest
                reached = turns * total + 1 if seen > turns * total else reached
            spared = latest if seen <= _PINNED_TURNS * total else latest[:0]
            evicted = self._evict(window, namespace, count - gone, spared, seen <= _TURNS * total)
            gone += evicted
            seen = reached if evicted else seen
        return gone

    def _claims(self, segments: Sequence[SegmentRow], total: int) -> int:
        """How many slots of a store of few are pinned; in a larger one there is room for both."""
        if total > _PIECE or not segments:
            return 0
        slots = np.concatenate([slot_ids(row.id, np.arange(row.slots)) for row in segments])
        return int(np.count_nonzero(self._pins.pinned(slots)))

    def _evict(self, window: _Window, namespace: int, count: int, spared: Slots, sparing: bool) -> int:
        hits = self._hits(window.stretches)[window.places]
        hits[np.isin(window.sweep.slots, spared)] = HITS_MAX
        if sparing:
            hits[self._pins.pinned(window.sweep.slots)] = HITS_MAX
        chosen = window.sweep.take(count, hits)
        if not len(chosen):
            return 0
        return int(self._index.delete(namespace, window.keys[chosen].tobytes(), window.sweep.slots[chosen]).sum())

    def _enter(self, namespace: int, segments: Sequence[SegmentRow], step: int, total: int) -> _Window:
        """Move the hand by a window, take hits from what lies there, and see what is cold."""
        start = self._index.move_hand(namespace, step, total)
        where = stretches(segments, start, start + step) + stretches(segments, 0, start + step - total)
        slots = np.concatenate([slot_ids(row.id, np.arange(first, last)) for row, first, last in where])
        found = self._occupants(where)
        occupied = np.isin(slots, found.records["slot"].astype(np.int64))
        hits = self._hits(where)
        self._age(namespace, where, hits, int(np.count_nonzero(self._hits(stretches(segments, 0, total)))))
        cold = occupied & (hits == 0)
        which = (hits == 0)[occupied]
        sweep = Sweep(slots[cold], found.records["depth"][which], slots[occupied & ~cold], segments[0].group)
        return _Window(where, sweep, found.keys[which], np.flatnonzero(cold))

    def _age(self, namespace: int, where: list[Stretch], hits: Hits, hot: int) -> None:
        after = aged(hits, self._index.usage(namespace).used, hot)
        if after is hits:
            return
        done = 0
        for row, first, last in where:
            self._clock.write(row.clock + first, after[done : done + last - first])
            done += last - first

    def _hits(self, where: list[Stretch]) -> Hits:
        return np.concatenate([self._clock.read(row.clock + first, last - first) for row, first, last in where])

    def _occupants(self, where: list[Stretch]) -> Occupants:
        """In the order of the window's slots."""
        found = [
            self._index.occupants(*slot_ids(row.id, np.array([piece, min(last, piece + _PIECE)])).tolist())
            for row, first, last in where
            for piece in range(first, last, _PIECE)
        ]
        return Occupants(np.concatenate([each.keys for each in found]), np.concatenate([e.records for e in found]))
