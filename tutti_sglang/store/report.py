"""Log lines about trouble, at most one per kind and minute."""

import logging
import threading
import time
from collections.abc import Callable

PERIOD = 60.0


class Reporter:
    """Thread safe. What comes again within PERIOD seconds is counted, and the next line of its kind says how often."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, message: str) -> None:
        """Log `message`, unless this kind was logged less than PERIOD seconds ago."""
        held = self._held(kind)
        if held is not None:
            self._logger.warning("tutti: %s%s", message, f" ({held} more since the last line)" if held else "")

    def failed(self, what: str) -> None:
        """Log an exception that nothing expected, with its stack. Call it from the except block."""
        if self._held(what) is not None:
            self._logger.exception("tutti: %s failed; SGLang goes on without it", what)

    def _held(self, kind: str) -> int | None:
        """How many lines of this kind were held back before this one; None when it is to be held back too."""
        now = self._clock()
        with self._lock:
            last, held = self._kinds.get(kind, (-PERIOD, 0))
            if now - last < PERIOD:
                self._kinds[kind] = (last, held + 1)
                return None
            self._kinds[kind] = (now, 0)
            return held
