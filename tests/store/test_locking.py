"""The store's lock ends with whoever holds it, and every wait for it has an end."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti_sglang.store.locking import store_lock


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_one_holds_it_at_a_time(directory: int) -> None:
    with store_lock(directory, 0) as first, store_lock(directory, 0.05) as second:
        assert (first, second) == (True, False)
    with store_lock(directory, 0) as third:
        assert third


def test_a_child_that_was_forked_while_it_was_held_does_not_keep_it(directory: int) -> None:
    with store_lock(directory, 0):
        child = os.fork()
        if not child:
            time.sleep(100)
            os._exit(0)
    try:
        with store_lock(directory, 0) as held:
            assert held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_it_ends_with_a_killed_holder(directory: int) -> None:
    child = os.fork()
    if not child:
        with store_lock(directory, 0):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with store_lock(directory, 0) as held:
        assert held
