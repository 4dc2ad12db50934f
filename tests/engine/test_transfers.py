"""IOCTX are joined exactly where they follow one another, within the limits of a system call."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch
from tutti_sglang.engine.transfers import IOV_MAX, Transfer, coalesce, malformed

SEGMENT = 1 << 20
BLOCK = 4096


def make_batch(*rows: tuple[int, int, int, int]) -> Batch:
    """(drive, operation, offset, length) each."""
    batch = np.zeros(len(rows), IOCTX_DTYPE)
    for i, (drive, operation, offset, length) in enumerate(rows):
        batch[i] = (0, offset, length, 0, drive, operation, 0, 0)
    return batch


def cut(batch: Batch, max_io: int = SEGMENT) -> list[tuple[int, int]]:
    bad = malformed(batch, SEGMENT)
    return [(each.first, each.last) for each in coalesce(batch, bad, SEGMENT, max_io)]


def join_one_by_one(batch: Batch, max_io: int) -> list[Transfer]:
    """The same as `coalesce`, as one would say it."""
    made: list[Transfer] = []
    size = end = 0
    kind = None
    for i, (_, offset, length, _, drive, operation, _, _) in enumerate(batch.tolist()):
        segment = offset // SEGMENT
        joins = kind == (drive, operation, segment) and offset == end and size + length <= max_io
        if joins and i - made[-1].first < IOV_MAX:
            made[-1] = made[-1]._replace(last=i + 1)
            size += length
        else:
            made.append(Transfer(i, i + 1, drive, segment))
            size = length
        kind, end = (drive, operation, segment), offset + length
    return made


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 5), st.integers(1, 3)), max_size=60),
    st.integers(1, 8),
)
def test_it_is_what_one_would_do_one_by_one(steps: list[tuple[int, int, int, int]], most: int) -> None:
    ends = [SEGMENT - 20 * BLOCK, 0]
    rows = []
    for drive, operation, gap, blocks in steps:
        start = ends[drive] + max(0, gap - 4) * BLOCK
        if start % SEGMENT + blocks * BLOCK > SEGMENT:
            start = -(-start // SEGMENT) * SEGMENT
        rows.append((drive, operation, start, blocks * BLOCK))
        ends[drive] = start + blocks * BLOCK
    batch = make_batch(*rows)
    assert coalesce(batch, malformed(batch, SEGMENT), SEGMENT, most * BLOCK) == join_one_by_one(batch, most * BLOCK)


def test_neighbours_are_joined_up_to_max_io() -> None:
    batch = make_batch(*[(0, 0, i * BLOCK, BLOCK) for i in range(10)])
    assert cut(batch) == [(0, 10)]
    assert cut(batch, 4 * BLOCK) == [(0, 4), (4, 8), (8, 10)]
    assert cut(batch, 4 * BLOCK + 1) == [(0, 4), (4, 8), (8, 10)]
    assert cut(batch, 1) == [(i, i + 1) for i in range(10)]


def test_neither_drive_nor_operation_nor_segment_is_mixed() -> None:
    assert cut(make_batch((0, 0, 0, BLOCK), (1, 0, BLOCK, BLOCK))) == [(0, 1), (1, 2)]
    assert cut(make_batch((0, 0, 0, BLOCK), (0, 1, BLOCK, BLOCK))) == [(0, 1), (1, 2)]
    assert cut(make_batch((0, 0, SEGMENT - BLOCK, BLOCK), (0, 0, SEGMENT, BLOCK))) == [(0, 1), (1, 2)]
    assert cut(make_batch((0, 0, BLOCK, BLOCK), (0, 0, 0, BLOCK))) == [(0, 1), (1, 2)]


def test_a_system_call_takes_iov_max_pieces() -> None:
    batch = make_batch(*[(0, 0, i, 1) for i in range(2 * IOV_MAX + 5)])
    assert cut(batch) == [(0, IOV_MAX), (IOV_MAX, 2 * IOV_MAX), (2 * IOV_MAX, 2 * IOV_MAX + 5)]


def test_what_cannot_be_is_left_out_and_joins_nothing() -> None:
    batch = make_batch(
        (0, 0, 0, 8), (0, 0, 8, 0), (0, 0, 8, 8), (0, 7, 16, 8), (0, 0, SEGMENT - 4, 8), (0, 0, 0, 2**31)
    )
    assert malformed(batch, SEGMENT).tolist() == [False, True, False, True, True, True]
    assert cut(batch) == [(0, 1), (2, 3)]


def test_nothing_makes_nothing() -> None:
    assert cut(make_batch()) == []
