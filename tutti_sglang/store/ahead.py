"""What was read ahead: the next batch of a request is on its way while SGLang handles the last one.

For small pages a batch is a few MiB, and a drive that idles between two calls gives half of what it could. What nobody
asks for after all is given up after a moment.
"""

import threading
import time
from collections import deque
from typing import NamedTuple

from tutti_sglang.engine.batch import Ticket
from tutti_sglang.engine.moving import Begun, Mover, abandon
from tutti_sglang.engine.staging import Extent
from tutti_sglang.store.parts import Parts

KEPT = 2
"""Batches: one for each thread of a process that reads."""

SHARE = 8
"""A batch ahead fills at most this part of staging: 64 MiB of the default size."""

SECONDS = 1.0
"""How long one is kept."""


class Lanes(NamedTuple):
    """Staging for pieces of `nbytes` each, `step` objects a piece."""

    extent: Extent
    nbytes: int
    step: int

    @property
    def addresses(self) -> list[int]:
        """Where each piece starts."""
        end = self.extent.address + self.extent.size
        return list(range(self.extent.address, end - self.nbytes + 1, self.nbytes))


class Ahead(NamedTuple):
    """One batch. `name`: what it is that is read."""

    name: tuple[int, bytes, bytes]
    begun: Begun
    lanes: Lanes
    since: float


class ReadAhead:
    """Thread safe."""

    def __init__(self, parts: Parts) -> None:
        self.possible = isinstance(parts.engine, Mover)
        self._parts = parts
        self._lock = threading.Lock()
        self._kept: deque[Ahead] = deque()

    def lanes(self, count: int, nbytes: int, step: int) -> Lanes | None:
        """Memory for up to `count` pieces, None where there is none to spare."""
        count = min(count, self._parts.staging.size // SHARE // nbytes)
        extent = self._parts.staging.acquire(count * nbytes) if count else None
        return Lanes(extent, nbytes, step) if extent else None

    def keep(self, ahead: Ahead) -> None:
        """For who asks for it. The oldest makes way."""
        self._parts.metrics.add("tutti_ahead_batches", outcome="begun")
        with self._lock:
            self._kept.append(ahead)
            oldest = self._kept.popleft() if len(self._kept) > KEPT else None
        if oldest:
            self._give_up(oldest)

    def claim(self, name: tuple[int, bytes, bytes]) -> Ahead | None:
        """The batch of that name: it is the caller's now."""
        with self._lock:
            found = next((each for each in self._kept if each.name == name), None)
            if found:
                self._kept.remove(found)
        if found:
            self._parts.metrics.add("tutti_ahead_batches", outcome="used")
        return found

    def tidy(self) -> None:
        """Give up what was not asked for in time."""
        self._drop(time.monotonic() - SECONDS)

    def forget(self) -> None:
        """Give up everything."""
        self._drop(float("inf"))

    def give_back(self, lanes: Lanes, still_open: dict[int, Ticket]) -> None:
        """What the drives still owe stays where they may write: it returns when the answer comes."""
        staging = self._parts.staging
        for lane, part in enumerate(staging.split(lanes.extent, lanes.nbytes) if still_open else [lanes.extent]):
            if lane in still_open:
                staging.quarantine(part, self._parts.engine, still_open[lane])
            else:
                staging.release(part)

    def _drop(self, before: float) -> None:
        with self._lock:
            gone = [each for each in self._kept if each.since < before]
            self._kept = deque(each for each in self._kept if each.since >= before)
        for each in gone:
            self._give_up(each)

    def _give_up(self, ahead: Ahead) -> None:
        self.give_back(ahead.lanes, abandon(self._parts.engine, ahead.begun))
