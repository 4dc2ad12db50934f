"""Owners: the processes that use a store. Alive is who holds the flock on its `owners/<uuid>`."""

import contextlib
import fcntl
import os
import re
import socket
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tutti_sglang.errors import StoreError

_IDLE = (1 << 64) - 1
_STATE = struct.Struct("<QdQ")
"""Oldest epoch that is being read, CLOCK_MONOTONIC of the latest read that counts, and the inode of the time namespace,
without which clocks cannot be compared."""
_NOTE_AT, _NOTE_SIZE = 64, 256
_STALE = 60.0  # seconds after which a file that was made but never locked is nobody's
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_NAME = re.compile(r"[0-9a-f]{32}")


class Process(NamedTuple):
    """An owner as tools see it: `note` says pid and host, for people."""

    uuid: str
    alive: bool
    note: str


def processes(directory: Path) -> list[Process]:
    """All owners of a store, by somebody who is none. OSError."""
    found = []
    for entry in os.scandir(directory) if directory.is_dir() else ():
        if not _NAME.fullmatch(entry.name):
            continue
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                note = os.pread(fd, _NOTE_SIZE, _NOTE_AT).decode(errors="replace").partition(",")[0]
                found.append(Process(entry.name, _locked(fd), note.strip("\0\n")))
            finally:
                os.close(fd)
    return found


class Read:
    """One read under way: from before its lookup until its bytes are copied."""

    __slots__ = ("epoch", "start")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.start = time.monotonic()

    def expired(self, grace: float) -> bool:
        """Whether it took so long that its slots may belong to somebody else: its objects are misses."""
        return time.monotonic() - self.start > grace


class Owners:
    """This process's place among the owners of a store, and a view of the others. Thread safe, not fork safe.

    A slot freed at epoch e is reused once every living owner's published epoch has reached e. To be safe an owner
    publishes before its lookup the epoch that it knew before: `with owners.reading(index.last_epoch, grace) as read`.
    """

    def __init__(self, directory: Path) -> None:
        self.uuid = uuid.uuid4().hex
        self._directory = directory
        self._lock = threading.Lock()
        self._reads: set[Read] = set()
        self._zone = os.stat("/proc/self/ns/time").st_ino if os.path.exists("/proc/self/ns/time") else 0
        try:
            self._fd = self._create()
        except OSError as error:
            raise StoreError(
                f"{directory} cannot be used ({error.strerror})", "Check that index_dir is writable and not full"
            ) from error
        # A fork would inherit the lock and keep this owner alive after its process died.
        _close_in_children(self)

    def close(self) -> None:
        """Leave: the file goes, and with it the lock. Leases must be given back before. Idempotent."""
        with self._lock:  # a read that ends just now must not write to a descriptor that is somebody else's by then
            if self._fd >= 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._directory / self.uuid)
                os.close(self._fd)
                self._fd = -1

    @contextlib.contextmanager
    def reading(self, epoch: int, grace: float) -> Iterator[Read]:
        """Hold every slot that is freed after `epoch`, for `grace` seconds at most."""
        read = Read(epoch)
        try:
            self.begin(read, grace)
            yield read
        finally:
            self.end(read, grace)

    def begin(self, read: Read, grace: float) -> None:
        """As `reading` does. OSError."""
        self._publish(grace, begun=read)

    def end(self, read: Read, grace: float) -> None:
        """A read that has begun, or was to."""
        self._publish(grace, ended=read)

    def oldest_epoch(self, current: int, grace: float) -> int:
        """What every reader has passed. `current` is the store's epoch, read before this call: a reader that starts
        after that finds nothing that was freed up to it. Reads older than `grace` seconds do not count, they miss.
        OSError when it cannot be told."""
        now = time.monotonic()
        return min([current, *(self._held(name, now, grace) for name in self._names())])

    def alive(self, name: str) -> bool:
        """Whether the process of owner `name` lives, in whatever container. OSError when it cannot be told."""
        fd = self._open(name)
        if fd is None:
            return False
        try:
            return _locked(fd)
        finally:
            os.close(fd)

    def live(self) -> list[str]:
        """All living owners, this one too."""
        return [name for name in self._names() if self.alive(name)]

    def dead(self) -> list[str]:
        """Owners whose process died without leaving: reclaim their leases, then `remove` them."""
        return [name for name in self._names() if not self.alive(name)]

    def remove(self, name: str) -> None:
        """Forget a dead owner."""
        assert name != self.uuid
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory / name)

    def _create(self) -> int:
        """A file is locked before it has its name, so that nobody sees it unlocked."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._remove_unfinished()
        temporary = self._directory / f".{self.uuid}"
        fd = os.open(temporary, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, _STATE.pack(_IDLE, 0.0, self._zone), 0)
            os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}, for people only\n".encode(), _NOTE_AT)
            os.rename(temporary, self._directory / self.uuid)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _remove_unfinished(self) -> None:
        for entry in os.scandir(self._directory):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.startswith(".") and time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE:
                    os.unlink(entry.path)

    def _publish(self, grace: float, begun: Read | None = None, ended: Read | None = None) -> None:
        """The start of the latest read goes with the oldest epoch: others then never drop a read that still counts. One
        that has expired is left out here, so it holds slots for twice `grace` at most."""
        with self._lock:
            self._reads -= {ended}
            if begun:
                self._reads.add(begun)
            count = [read for read in self._reads if not read.expired(grace)]
            epoch = min((read.epoch for read in count), default=_IDLE)
            start = max((read.start for read in count), default=0.0)
            os.pwrite(self._fd, _STATE.pack(epoch, start, self._zone), 0)

    def _held(self, name: str, now: float, grace: float) -> int:
        """The oldest epoch that this owner still reads; _IDLE when it is dead, or reads nothing, or for too long."""
        fd = self._open(name)
        if fd is None:
            return _IDLE
        try:
            if not _locked(fd):
                return _IDLE
            # A read may see half of a write. Two reads, and the safer half of each, cannot.
            pairs = [_STATE.unpack(os.pread(fd, _STATE.size, 0)) for _ in range(2)]
            epoch, start = min(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
            return _IDLE if pairs[0][2] == self._zone and now - start > grace else epoch
        finally:
            os.close(fd)

    def _names(self) -> list[str]:
        with os.scandir(self._directory) as entries:
            return [each.name for each in entries if _NAME.fullmatch(each.name) and each.is_file(follow_symlinks=False)]

    def _open(self, name: str) -> int | None:
        """None where there is no such owner. Any other failure (EMFILE, EIO) is not proof that it is dead: OSError."""
        try:
            return os.open(self._directory / name, _FLAGS)
        except FileNotFoundError:
            return None


def _locked(fd: int) -> bool:
    """Probers share, so that they do not take one another for the owner."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


_open_owners: "weakref.WeakSet[Owners]" = weakref.WeakSet()


def _close_in_children(owners: Owners) -> None:
    if not _open_owners:
        os.register_at_fork(after_in_child=_forget_parents_locks)
    _open_owners.add(owners)


def _forget_parents_locks() -> None:
    for owners in _open_owners:
        if owners._fd >= 0:
            os.close(owners._fd)
            owners._fd = -1
