"""The store's lock: one process at a time makes or drops segments. It ends with its holder, and no wait for it is
unbounded."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from tutti_sglang.store.directory import LOCK

_POLL = 0.005


@contextlib.contextmanager
def store_lock(index_dir: int, timeout: float) -> Iterator[bool]:
    """Hold the lock of the store whose open index directory this is; False when it could not be had within `timeout`
    seconds.

    An open file description of its own for each holder: flock then keeps threads apart as it does processes.
    """
    fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=index_dir)
    try:
        yield _take(fd, time.monotonic() + timeout)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child that was forked meanwhile has it open too
        os.close(fd)


def _take(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        else:
            return True
