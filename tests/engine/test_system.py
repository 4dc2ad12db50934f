"""The seam moves exactly the memory it is given, and pieces of memory are cut at any byte."""

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.engine.batch import Operation
from tutti_sglang.engine.system import SYSTEM, Iovecs, Place, head, tail


def iovecs(*sizes: int) -> Iovecs:
    return np.array([(1000 * (i + 1), size) for i, size in enumerate(sizes)], dtype=np.uint64)


def addresses(pieces: Iovecs) -> list[int]:
    return [address + i for address, size in pieces.tolist() for i in range(size)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 60))
def test_head_and_tail_cut_the_memory_in_two(sizes: list[int], at: int) -> None:
    pieces = iovecs(*sizes)
    before = pieces.copy()
    assert addresses(head(pieces, at)) == addresses(pieces)[:at]
    assert addresses(tail(pieces, at)) == addresses(pieces)[at:]
    assert (head(pieces, at)[:, 1] > 0).all()
    assert (tail(pieces, at)[:, 1] > 0).all()
    assert (pieces == before).all()


def test_transfer_moves_pieces_in_order_and_tells_errors(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    source = np.arange(100, dtype=np.uint8)
    pieces = np.array([(source.ctypes.data + 50, 50), (source.ctypes.data, 50)], dtype=np.uint64)
    assert SYSTEM.transfer(Operation.WRITE, Place(fd, 10, 0, 0), pieces) == 100
    assert os.pread(fd, 200, 0) == bytes(10) + bytes(range(50, 100)) + bytes(range(50))
    back = np.zeros(200, dtype=np.uint8)
    pieces = np.array([(back.ctypes.data, 200)], dtype=np.uint64)
    assert SYSTEM.transfer(Operation.READ, Place(fd, 60, 0, 0), pieces) == 50
    assert (back[:50] == source[:50]).all()
    assert SYSTEM.transfer(Operation.READ, Place(fd, 999, 0, 0), pieces) == 0
    os.close(fd)
    assert SYSTEM.transfer(Operation.READ, Place(fd, 0, 0, 0), pieces) == -errno.EBADF


def test_a_transfer_that_a_signal_interrupts_is_repeated() -> None:
    """What can be interrupted has no offset, and what has an offset is hardly ever interrupted: a call stands in."""
    answers = [errno.EINTR, errno.EINTR, 0]

    def call(*_: object) -> int:
        error = answers.pop(0)
        ctypes.set_errno(error)
        return -1 if error else 77

    system = type(SYSTEM)()
    system._calls = {Operation.READ: call, Operation.WRITE: call}
    assert system.transfer(Operation.READ, Place(0, 0, 0, 0), iovecs(77)) == 77
    assert answers == []
