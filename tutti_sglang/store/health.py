"""Whether a drive serves: out of service after repeated failures or a hang, tried again later."""

import threading
import time
from collections.abc import Callable

STRIKES = 4
"""Batches in a row of which a drive served nothing."""

RATIO, ENOUGH = 0.25, 32
"""Share of failed I/O that puts a drive out of service, once at least ENOUGH have failed."""

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds until a drive is tried again; doubled after each failed attempt."""


class Health:
    """Of one drive and one direction (a read-only drive still serves reads). Thread safe; `in_service` is a plain
    attribute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.in_service = True
        self.reason = ""
        self._clock = clock
        self._lock = threading.Lock()
        self._strikes = 0
        self._failed = self._total = 0
        self._pause = FIRST_PAUSE
        self._next_try = 0.0

    def record(self, failed: int, total: int, reason: str = "") -> bool:
        """One batch: `failed` of `total` I/O of this drive. True when it puts the drive out of service."""
        with self._lock:
            self._strikes = self._strikes + 1 if failed == total else 0
            self._failed, self._total = self._failed + failed, self._total + total
            if self._total > 8 * ENOUGH:
                self._failed, self._total = self._failed // 2, self._total // 2
            often = self._failed >= ENOUGH and self._failed > RATIO * self._total
            return self._out(reason) if self._strikes >= STRIKES or often else False

    def hang(self, reason: str) -> bool:
        """An I/O did not come back in time, or the drive is plainly gone. True when it puts the drive out of
        service."""
        with self._lock:
            return self._out(reason)

    def due(self) -> bool:
        """Whether an attempt to bring the drive back should be made now."""
        return not self.in_service and self._clock() >= self._next_try

    def tried(self, works: bool) -> None:
        """The outcome of such an attempt."""
        with self._lock:
            if works:
                self.in_service, self.reason, self._pause = True, "", FIRST_PAUSE
                self._strikes = self._failed = self._total = 0
            else:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                self._next_try = self._clock() + self._pause

    def _out(self, reason: str) -> bool:
        was = self.in_service
        self.in_service = False
        if was:
            self.reason = reason
            self._next_try = self._clock() + self._pause
        return was
