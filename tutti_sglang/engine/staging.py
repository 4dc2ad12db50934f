"""The bounded memory that bytes pass through: one aligned region, handed out in extents, shared by the process."""

import logging
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

import numpy as np

from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import IN_PROGRESS, Ticket
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import pinning
from tutti_sglang.memory import PAGE, Region, memory_limit
from tutti_sglang.metrics import Metrics
from tutti_sglang.units import align_up, format_size

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.05
"""The quarantine is looked through at most this often."""

_REPORT_STEPS = 64  # the gauge of used bytes follows in steps of size / 64: an exact one would cost more than the rest


@dataclass(frozen=True, slots=True)
class Extent:
    """`size` bytes of staging at `address`, both multiples of 4 KiB."""

    address: int
    size: int


class FreeRanges:
    """The free ranges of [0, size): best fit, lowest place first; neighbours merge when they come back."""

    def __init__(self, size: int) -> None:
        self._end_of = {0: size}
        self._start_of = {size: 0}
        self._by_size = [(size, 0)]

    def take(self, size: int) -> int | None:
        """The start of `size` bytes; None when no range is that long."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        length, start = self._by_size.pop(at)
        del self._end_of[start], self._start_of[start + length]
        if length > size:
            self._add(start + size, start + length)
        return start

    def give(self, start: int, size: int) -> None:
        """Return what `take` gave."""
        end = start + size
        if (before := self._start_of.pop(start, None)) is not None:
            self._remove(before, start)
            start = before
        if (after := self._end_of.get(end)) is not None:
            del self._start_of[after]
            self._remove(end, after)
            end = after
        self._add(start, end)

    def ranges(self) -> list[tuple[int, int]]:
        """(start, end) of every free range, in order."""
        return sorted(self._end_of.items())

    def _add(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        insort(self._by_size, (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        del self._end_of[start]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]


class _Waiter:
    """A caller of `wait`, in its turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.extent: Extent | None = None
        self.ready = threading.Event()


class Staging:
    """A pool of `size` bytes. Thread safe; waiters are served in the order they came, and nobody overtakes them.
    `pinned`: a CUDA device that this process uses reads and writes it."""

    def __init__(self, size: int, metrics: Metrics) -> None:
        """Raises EngineError when the system refuses the memory."""
        if size > (limit := memory_limit()):
            raise EngineError(
                f"{format_size(size)} of staging memory, where this process may use {format_size(limit)}",
                "Lower staging_size",
            )
        try:
            self._region = Region(size)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(f"No {format_size(size)} of staging memory: {error}", "Lower staging_size") from error
        self.address, self.size = self._region.address, self._region.size
        self._pin = pinning.pin(self.address, self.size)
        self.pinned = self._pin.pinned
        if self._pin.reason:
            hint = "lower staging_size, or raise `ulimit -l`"
            logger.warning(
                "tutti: staging is not pinned, copies to the device are slower: %s; %s", self._pin.reason, hint
            )
        self.used = self.high_water = self._reported = 0
        self._metrics = metrics
        self._lock = threading.Lock()
        self._free = FreeRanges(self.size)
        self._held: dict[int, int] = {}
        self._waiting: deque[_Waiter] = deque()
        self._quarantine: list[tuple[Extent, Engine, Ticket]] = []
        self._next_sweep = 0.0
        self._closed = False
        metrics.set("tutti_staging_bytes", self.size, kind="size")

    def acquire(self, nbytes: int) -> Extent | None:
        """`nbytes` > 0, rounded up to 4 KiB; None when no range is so long or somebody waits. Never blocks."""
        self._sweep()
        with self._lock:
            return None if self._waiting else self._take(align_up(nbytes, PAGE))

    def wait(self, nbytes: int, deadline: float) -> Extent | None:
        """As `acquire`, but waits until `deadline` (time.monotonic() seconds). None at once for more than there is."""
        waiter = _Waiter(align_up(nbytes, PAGE))
        if waiter.size > self.size:
            return None
        with self._lock:
            self._waiting.append(waiter)
            self._serve()
        while not waiter.ready.is_set() and (left := deadline - time.monotonic()) > 0:
            waiter.ready.wait(min(left, SWEEP_SECONDS))
            self._sweep()
        with self._lock:
            if waiter.extent is None:
                self._waiting.remove(waiter)
                self._serve()  # the next in turn may want less
            return waiter.extent

    def release(self, extent: Extent) -> None:
        """Give back what `acquire` or `wait` gave."""
        with self._lock:
            self._return(extent)
        self._sweep()

    def split(self, extent: Extent, nbytes: int) -> list[Extent]:
        """`extent` in pieces of `nbytes`, a multiple of 4 KiB, the last one what is left; each goes back by itself."""
        starts = range(0, extent.size, nbytes)
        parts = [Extent(extent.address + at, min(nbytes, extent.size - at)) for at in starts]
        with self._lock:
            assert self._held.pop(extent.address, None) == extent.size
            self._held.update((part.address, part.size) for part in parts)
        return parts

    def quarantine(self, extent: Extent, engine: Engine, ticket: Ticket) -> None:
        """Release `extent` as soon as `engine` has answered all of `ticket`; until then a drive may write into it."""
        with self._lock:
            assert self._held.get(extent.address) == extent.size
            self._quarantine.append((extent, engine, ticket))
            self._next_sweep = 0.0
        self._sweep()

    @property
    def quarantined(self) -> int:
        """Bytes whose I/O has not come back."""
        with self._lock:
            return sum(extent.size for extent, _, _ in self._quarantine)

    def close(self) -> None:
        """Give out nothing any more, and forget the memory with the last extent: a thread may still be copying out of
        it, a drive may still write into it."""
        self._next_sweep = 0.0
        self._sweep()
        with self._lock:
            self._closed = True
            self._forget()

    def _forget(self) -> None:
        if self._closed and not self._held:
            self._pin.release()
            self._pin = pinning.Pin(False, "", lambda: None)  # close() may come again
            self._region.close()

    def _take(self, size: int) -> Extent | None:
        start = None if self._closed else self._free.take(size)
        if start is None:
            return None
        extent = Extent(self.address + start, size)
        self._held[extent.address] = size
        self._account(size)
        return extent

    def _return(self, extent: Extent) -> None:
        assert self._held.pop(extent.address, None) == extent.size, "released twice, or not of this pool"
        self._free.give(extent.address - self.address, extent.size)
        self._account(-extent.size)
        self._serve()
        self._forget()

    def _serve(self) -> None:
        while self._waiting and (extent := self._take(self._waiting[0].size)):
            waiter = self._waiting.popleft()
            waiter.extent = extent
            waiter.ready.set()

    def _account(self, change: int) -> None:
        self.used += change
        if self.used > self.high_water:
            self.high_water = self.used
        if not self.used or abs(self.used - self._reported) * _REPORT_STEPS >= self.size:
            self._reported = self.used
            self._metrics.set("tutti_staging_bytes", self.used, kind="used")
            self._metrics.set("tutti_staging_bytes", self.high_water, kind="high_water")

    def _sweep(self) -> None:
        """Release what came back. The engines are asked without the lock: they may take their own."""
        if not self._quarantine or time.monotonic() < self._next_sweep:
            return
        with self._lock:
            self._next_sweep = time.monotonic() + SWEEP_SECONDS
            looked_at = list(self._quarantine)
        done = [entry for entry in looked_at if _answered(entry[1], entry[2])]
        with self._lock:
            for entry in done:
                if entry in self._quarantine:
                    self._quarantine.remove(entry)
                    self._return(entry[0])
            left = sum(extent.size for extent, _, _ in self._quarantine)
        self._metrics.set("tutti_quarantined_bytes", left)


def _answered(engine: Engine, ticket: Ticket) -> bool:
    return not np.any(engine.wait(ticket, 0) == IN_PROGRESS)
