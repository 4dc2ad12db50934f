"""Calls into a store that are under way."""

import threading
import time


class Calls:
    """How many calls are under way: nothing may be closed that one of them uses."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_none(self, deadline: float) -> bool:
        """False when some are still under way at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, max(0.0, deadline - time.monotonic()))
