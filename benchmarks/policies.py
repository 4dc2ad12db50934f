"""Caches of pages that replay a trace: ours, by the store's own policy code, and what it is compared with.

All know prefixes: of a request only the pages before the first missing one are hits, and LRU and FIFO touch a prompt
from its tail to its head, so that heads stay longest.
"""

import heapq
from collections import OrderedDict
from typing import Protocol

import numpy as np

from benchmarks.traces import Trace
from tutti_sglang.store.admission import Seen
from tutti_sglang.store.eviction import HITS_MAX, Sweep, aged, window_size
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.slots import choose


class Policy(Protocol):
    """A cache of `capacity` pages."""

    written: int

    def __init__(self, capacity: int, trace: Trace) -> None: ...
    def request(self, number: int, pages: list[int]) -> int:
        """Serve request `number` of the trace and store what it lacked; how many leading pages were there."""
        ...


def hit_rate(policy: Policy, trace: Trace) -> float:
    """Share of the counted pages that were hits."""
    hits = total = 0
    for number, (pages, counted) in enumerate(trace):
        found = policy.request(number, pages)
        if counted:
            hits, total = hits + found, total + len(pages)
    return hits / total


class Lru:
    """Least recently used goes, touched tail first."""

    renews = True

    def __init__(self, capacity: int, trace: Trace) -> None:
        self.written = 0
        self._capacity = capacity
        self._pages: OrderedDict[int, None] = OrderedDict()

    def request(self, number: int, pages: list[int]) -> int:
        found = _leading(pages, self._pages)
        for page in reversed(pages):
            self.written += page not in self._pages
            self._pages.setdefault(page)
            if self.renews:
                self._pages.move_to_end(page)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)
        return found


class Fifo(Lru):
    """What was written first goes."""

    renews = False


class Belady:
    """Knows the future: what is needed again last goes, the deepest first among equals."""

    def __init__(self, capacity: int, trace: Trace) -> None:
        self.written = 0
        self._capacity = capacity
        self._next = _next_uses(trace)
        self._pages: dict[int, int] = {}
        self._order: list[tuple[int, int, int]] = []

    def request(self, number: int, pages: list[int]) -> int:
        found = _leading(pages, self._pages)
        for depth, page in enumerate(pages):
            self.written += page not in self._pages
            self._pages[page] = self._next[number][depth]
            heapq.heappush(self._order, (-self._pages[page], -depth, page))
        while len(self._pages) > self._capacity:
            use, _, page = heapq.heappop(self._order)
            if self._pages.get(page) == -use:
                del self._pages[page]
        return found


class Clock:
    """The store's eviction over one namespace. Slots are leased, hits counted and windows swept by the store's code."""

    def __init__(self, capacity: int, trace: Trace, *, group: int = 4, admission: str = "all") -> None:
        self.written = 0
        self._group = group
        self._slots = capacity // group * group
        self._free = np.ones(self._slots, dtype=np.bool_)
        self._page = np.full(self._slots, -1, dtype=np.int64)
        self._depth = np.zeros(self._slots, dtype=np.int64)
        self._hits = np.zeros(self._slots, dtype=np.uint8)
        self._where: dict[int, int] = {}
        self._hand = 0
        self._sweep: Sweep | None = None
        self._seen = Seen() if admission == "second" else None

    def request(self, number: int, pages: list[int]) -> int:
        found = _leading(pages, self._where)
        # Those behind a gap are computed again, and their put finds them: that counts as a hit too.
        slots = np.array([self._where[page] for page in pages if page in self._where], dtype=np.int64)
        self._hits[slots] = np.minimum(self._hits[slots] + 1, HITS_MAX)
        missing = [(depth, page) for depth, page in enumerate(pages) if page not in self._where]
        self._put(self._admitted(missing)[: self._slots])
        return found

    def pages(self) -> set[int]:
        """What is stored."""
        return set(self._where)

    def _admitted(self, missing: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if self._seen is None:
            return missing
        numbers = np.zeros((len(missing), KEY_SIZE // 8), dtype=np.uint64)
        numbers[:, 0] = [page for _, page in missing]
        again = self._seen.again(numbers.tobytes())
        return [pair for pair, known in zip(missing, again, strict=True) if known]

    def _put(self, missing: list[tuple[int, int]]) -> None:
        lacking = len(missing) - int(self._free.sum())
        if lacking > 0:
            self._evict(lacking)
        slots = choose(self._free, self._group, len(missing))[: len(missing)] if missing else ()
        for slot, (depth, page) in zip(slots, missing, strict=True):
            self._where[page], self._page[slot], self._depth[slot] = int(slot), page, depth
        self._free[list(slots)] = False
        self.written += len(missing)

    def _evict(self, count: int) -> None:
        while count > 0:
            if self._sweep is None or not len(self._sweep):
                self._sweep = self._enter()
            slots = self._sweep.slots[self._sweep.take(count, self._hits[self._sweep.slots])]
            for page in self._page[slots].tolist():
                del self._where[page]
            self._free[slots] = True
            count -= len(slots)

    def _enter(self) -> Sweep:
        slots = (self._hand + np.arange(window_size(self._slots))) % self._slots
        self._hand = int(slots[-1] + 1) % self._slots
        occupied, hits = ~self._free[slots], self._hits[slots]
        self._hits[slots] = aged(hits, len(self._where), int(np.count_nonzero(self._hits)))
        cold = occupied & (hits == 0)
        return Sweep(slots[cold], self._depth[slots[cold]], slots[occupied & ~cold], self._group)


def _leading(pages: list[int], stored: OrderedDict[int, None] | dict[int, int]) -> int:
    """How many pages of a prompt are there before the first missing one."""
    for found, page in enumerate(pages):
        if page not in stored:
            return found
    return len(pages)


def _next_uses(trace: Trace) -> list[list[int]]:
    """Per request and page, the number of the next request that has it, len(trace) where there is none."""
    later: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        pages = trace[number].pages
        uses.append([later.get(page, len(trace)) for page in pages])
        later.update(dict.fromkeys(pages, number))
    return uses[::-1]
