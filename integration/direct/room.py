"""Bounded host memory for pages that were read ahead: given out in spans of pages, taken back page by page."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti_sglang.engine.staging import FreeRanges
from tutti_sglang.memory import Addresses, Region
from tutti_sglang.metrics import Metrics
from tutti_sglang.units import align_up

ALIGNMENT = 4096


@dataclass(eq=False)
class Span:
    """Some pages side by side. `rows`: (n, T) addresses; `left`: pages that somebody still holds."""

    start: int
    size: int
    rows: Addresses
    left: int


@dataclass(frozen=True, slots=True)
class Place:
    """One page in a span."""

    span: Span
    index: int

    @property
    def row(self) -> Addresses:
        """(T,) addresses of its tensors."""
        return np.asarray(self.span.rows[self.index])


class Room:
    """`size` bytes. Thread safe. The memory is touched only where pages are put."""

    def __init__(self, size: int, metrics: Metrics) -> None:
        """OSError when the system refuses the memory."""
        self._region = Region(size)
        self.address, self.size = self._region.address, self._region.size
        self._metrics = metrics
        self.freed: Callable[[], None] = lambda: None
        """Called when there is more room than before."""
        self._lock = threading.Lock()
        self._free = FreeRanges(self.size)
        self.used = 0
        metrics.set("tutti_preload_bytes", self.size, kind="size")

    def take(self, pages: int, sizes: Any) -> Span | None:
        """Room for `pages` pages of tensors of these sizes; None when there is not so much in one piece."""
        offsets = np.cumsum([0, *(align_up(each, 64) for each in sizes)])
        stride = int(offsets[-1])
        size = align_up(pages * stride, ALIGNMENT)
        with self._lock:
            start = self._free.take(size)
            if start is None:
                return None
            self._account(size)
        base = self.address + start + np.arange(pages, dtype=np.uint64) * np.uint64(stride)
        return Span(start, size, base[:, None] + offsets[:-1].astype(np.uint64), pages)

    def give(self, places: list[Place]) -> None:
        """The holder of these pages is done with them."""
        freed = False
        with self._lock:
            for place in places:
                place.span.left -= 1
                assert place.span.left >= 0, "given back twice"
                if not place.span.left:
                    self._free.give(place.span.start, place.span.size)
                    self._account(-place.span.size)
                    freed = True
        if freed:
            self.freed()

    def _account(self, change: int) -> None:
        self.used += change
        self._metrics.set("tutti_preload_bytes", self.used, kind="used")
