"""The gate's words: a row for each process of a store, in memory that they share; each process writes only its own.

The block is a small file in /dev/shm: mapping a file of a data drive would let a drive's failure end the process with
SIGBUS. A row counts while its process holds the kernel's lock on the row's number, which ends with the process, however
it ends and in whatever container it runs. Where there is no such file the block is this process's alone.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

SHARED = Path("/dev/shm")
ROWS, DRIVES = 64, 32
PID, BEAT, MODE, UNTIL = range(4)
"""Words of a row: of whom (0: nobody's), when the scheduler was last heard (ns, 0: there is none), what it runs, until
when (ns) it lets writes start."""
HEAD = 8
RUNNING, WAITING, DUE, WRITES, TURN = range(5)
"""Then these of each drive: reads in flight, reads that wait for writes, until when (ns) reads are due, writes in
flight, whether writes are next. Ordinals that are equal modulo DRIVES share theirs, which only costs time."""
PER_DRIVE = 5
WORDS = HEAD + DRIVES * PER_DRIVE
SIZE = ROWS * WORDS * 8

_ATTEMPTS = 20
_ABANDONED = 86400.0  # seconds
_LOOK = 20_000_000  # ns
_LOCK = struct.Struct("@hhqqi4x")  # struct flock of fcntl(2)


def word(drive: int, which: int) -> int:
    """Where a drive's word lies in a row."""
    return HEAD + (drive % DRIVES) * PER_DRIVE + which


class Rows:
    """`own`: number of this process's row; `why_alone`: why the block is not shared, or empty.

    Not fork safe: a child must not use it, and does not keep the parent's row alive."""

    def __init__(self, store: str, folder: Path = SHARED) -> None:
        """`store`: names the block. Never raises: the gate is advice, and a process without it is on its own."""
        self._path = folder / f"tutti-{store}.gate"
        self._fd = -1
        self.why_alone = ""
        self._peers: list[int] = []
        self._looked = -_LOOK
        try:
            _remove_abandoned(folder)
            self._fd, self.own = self._join()
            self._words = self._map()
        except OSError as error:
            self._leave()
            self.why_alone = f"{self._path}: {error.strerror or error}"
            self.own, self._words = 0, _alone()
        self._start = self.own * WORDS
        self._clear()
        self.set(PID, os.getpid())
        _remember(self)

    def get(self, at: int) -> int:
        """A word of this process."""
        return self._words[self._start + at]

    def set(self, at: int, value: int) -> None:
        """Change a word of this process."""
        self._words[self._start + at] = value

    def hear(self, mode: int, until: int, beat: int) -> None:
        """The scheduler's three words."""
        words, start = self._words, self._start
        words[start + UNTIL] = until
        words[start + MODE] = mode
        words[start + BEAT] = beat

    def any(self, places: Sequence[int]) -> bool:
        """Whether one of these words is not 0, here or in another living process."""
        words, start = self._words, self._start
        for at in places:
            if words[start + at]:
                return True
        return any(self.others(at) for at in places) if self._peers else False

    def look(self, now: int) -> None:
        """See from time to time (`now` in ns) which other processes there are."""
        if now - self._looked >= _LOOK and self._fd >= 0:
            self._looked = now
            self._peers = [row for row in range(ROWS) if row != self.own and self._words[row * WORDS + PID]]

    def others(self, at: int) -> list[int]:
        """The values other than 0 of a word of the other living processes."""
        if not self._peers:
            return []
        found = [(row, self._words[row * WORDS + at]) for row in self._peers]
        return [value for row, value in found if value and self.alive(row)]

    def alive(self, row: int) -> bool:
        """Whether the process of a row lives."""
        return self._fd >= 0 and _held(self._fd, row)

    def close(self) -> None:
        """Leave; the last one removes the file. Idempotent."""
        self._clear()
        if self._fd >= 0:
            # Whoever gets all rows is alone: one that opens the file now finds no row, and then no file.
            if _try_lock(self._fd, 0, ROWS):
                with contextlib.suppress(OSError):
                    self._path.unlink()
            self._leave()
        self._words, self._start, self._peers = _alone(), 0, []  # the mapping has a descriptor of its own

    def _clear(self) -> None:
        for at in range(WORDS):
            self.set(at, 0)

    def _leave(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _join(self) -> tuple[int, int]:
        """A descriptor that holds the lock of a row, and the row's number. OSError."""
        for _ in range(_ATTEMPTS):
            fd = _open(self._path)
            row = next((row for row in range(ROWS) if _try_lock(fd, row, 1)), None)
            if row is not None and _is_at(fd, self._path):
                return fd, row
            os.close(fd)
            time.sleep(0.001)
        raise OSError(errno.EUSERS, f"more than {ROWS} processes use the store")

    def _map(self) -> "memoryview[int]":
        # Another descriptor: mmap keeps a duplicate, which would hold the lock in a forked child.
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            memory = mmap.mmap(fd, SIZE)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from error
        finally:
            os.close(fd)
        return memoryview(memory).cast("Q")


def _alone() -> "memoryview[int]":
    return memoryview(bytearray(SIZE)).cast("Q")


def _open(path: Path) -> int:
    """The file, made where absent, with all its memory there: a hole would be a SIGBUS when /dev/shm is full."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise OSError(errno.EPERM, "it is not this user's own file")
        os.posix_fallocate(fd, 0, SIZE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove_abandoned(folder: Path) -> None:
    """What killed processes left of stores that nobody has opened since."""
    for path in folder.glob("tutti-*.gate"):
        with contextlib.suppress(OSError):
            found = path.stat(follow_symlinks=False)
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _ABANDONED:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if _try_lock(fd, 0, ROWS):
                        path.unlink()
                finally:
                    os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the file was not removed while it was opened."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _try_lock(fd: int, first: int, count: int) -> bool:
    """Locks of the open file description: they end when it is closed, and exclude others of the same process."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _held(fd: int, row: int) -> bool:
    """Whether another descriptor holds the row's lock."""
    asked = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, row, 1, 0))
    return bool(_LOCK.unpack(asked)[0] != fcntl.F_UNLCK)


_open_rows: "weakref.WeakSet[Rows]" = weakref.WeakSet()


def _remember(rows: Rows) -> None:
    if not _open_rows:
        os.register_at_fork(after_in_child=_forget_parents_locks)
    _open_rows.add(rows)


def _forget_parents_locks() -> None:
    for rows in _open_rows:
        rows._leave()
