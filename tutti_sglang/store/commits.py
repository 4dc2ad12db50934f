"""Whether anything was committed to a SQLite database in WAL mode since one looked last, without a statement.

The header of the WAL index (the file -shm, sqlite.org/walformat.html §2.1) is written anew by every commit, of whatever
process: it holds a counter, the length of the log and checksums of it. As long as it is the same, so is the database.
A statement costs a few system calls and, beside a busy Python thread, up to 5 ms each time it gives the GIL away.
"""

import contextlib
import os
from pathlib import Path

_VERSION = (3007000).to_bytes(4, "little"), (3007000).to_bytes(4, "big")
_SIZE = 48
_INITIALISED = 12  # the byte that says so


class Commits:
    """Thread safe. For a process that has a connection to the database, as long as it has one."""

    def __init__(self, database: Path) -> None:
        self._fd = _descriptor(f"{database}-shm")

    def header(self) -> bytes | None:
        """What the next commit will change; None where that cannot be said."""
        try:
            found = os.pread(self._fd, 2 * _SIZE, 0)
        except OSError:
            return None
        first, second = found[:_SIZE], found[_SIZE:]
        whole = len(found) == 2 * _SIZE and first == second and first[_INITIALISED] == 1
        return first if whole and first[:4] in _VERSION else None


def _descriptor(path: str) -> int:
    """SQLite's own descriptor of the file, -1 where there is none. A second one, once closed, would drop the locks that
    SQLite holds on the file in this process."""
    wanted = os.path.realpath(path)
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself, and what others close meanwhile
                if os.readlink(f"/proc/self/fd/{name}") == wanted:
                    return int(name)
    return -1
