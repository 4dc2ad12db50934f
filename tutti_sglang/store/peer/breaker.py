"""Whether the fleet is asked at all: not for a while after it failed or was late, longer each time until it has
delivered again. Background attempts find out, so that no request pays for them."""

import threading
import time
from collections.abc import Callable

STRIKES = 4
"""Calls in a row that failed."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds."""


class Breaker:
    """Thread safe; `closed` (calls may go) is a plain attribute. It begins open: nothing is known of the fleet."""

    def __init__(self, changed: Callable[[bool, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`changed`: told of each change, and why."""
        self.closed = False
        self._changed, self._clock = changed, clock
        self._lock = threading.Lock()
        self._strikes = 0
        self._pause = FIRST_PAUSE
        self._next_try = clock()

    def due(self) -> bool:
        """Whether an attempt should be made now."""
        return not self.closed and self._clock() >= self._next_try

    def tried(self, works: bool, reason: str = "") -> None:
        """The outcome of an attempt in the background."""
        with self._lock:
            was, self.closed = self.closed, works
            self._strikes = 0
            if not works:
                self._wait()
        if works != was:
            self._changed(works, reason)

    def worked(self, *, moved: bool) -> None:
        """A call was answered in time. `moved`: with bytes, which says that all is well."""
        self._strikes = 0
        if moved:
            self._pause = FIRST_PAUSE

    def failed(self, reason: str, *, late: bool = False) -> None:
        """A call failed. `late`: it was not answered in time: the next one would wait as long."""
        with self._lock:
            self._strikes += 1
            opens = self.closed and (late or self._strikes >= STRIKES)
            if opens:
                self.closed = False
                self._wait()
        if opens:
            self._changed(False, reason)

    def _wait(self) -> None:
        self._next_try = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
