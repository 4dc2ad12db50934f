"""The process that an engine belongs to: its threads and rings do not follow a fork."""

import os

from tutti_sglang.errors import EngineError


class Home:
    """Remembers the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """EngineError in a forked child."""
        if not self.here():
            raise EngineError(
                "An I/O engine does not survive fork(): its threads are in the parent", "Open the store in this process"
            )
