"""Opening segment files beside the caller: a file system that hangs costs whoever needs that file a moment, and nobody
else anything."""

import errno
import os
import threading
import time
from collections.abc import Callable

from tutti_sglang.store.drives import Drive

OPEN_SECONDS = 2.0
"""Then those who wait go on without the file. Who opens it stays, for as long as the file system does not answer."""


class Opening:
    """A thread that opens files."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._until = time.monotonic() + OPEN_SECONDS
        # A daemon: a file system that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=act, name="tutti-open", daemon=True)
        self._thread.start()

    def wait(self, until: float) -> None:
        """Until it is done, or OPEN_SECONDS after it began, or `until` of time.monotonic()."""
        self._thread.join(max(0.0, min(self._until, until) - time.monotonic()))


def open_file(drive: Drive, name: str) -> int:
    """For reading and writing; on a read-only file system for reading. OSError."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if drive.direct else 0)
    try:
        return os.open(name, os.O_RDWR | flags, dir_fd=drive.segments)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(name, os.O_RDONLY | flags, dir_fd=drive.segments)
