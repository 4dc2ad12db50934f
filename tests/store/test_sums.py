"""Rows of tensor checksums at rest: any slots, any order; what is missing reads as zeros."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tutti_sglang.store.sums import SumFiles


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SumFiles]:
    fd = os.open(tmp_path, os.O_RDONLY)
    found = SumFiles(fd)
    yield found
    found.close()
    os.close(fd)


@pytest.mark.parametrize("seed", range(5))
def test_rows_come_back_whatever_their_order(files: SumFiles, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = np.zeros((200, 7), dtype=np.uint64)
    for sync in (False, True):
        slots = rng.permutation(200)[: rng.integers(1, 100)]
        rows = rng.integers(1, 1 << 63, (len(slots), 7), dtype=np.uint64)
        files.write(5, slots, rows, sync)
        model[slots] = rows
    asked = rng.permutation(200)[:50]
    assert (files.read(5, asked, 7) == model[asked]).all()
    assert files.segments() == {5}


def test_a_missing_or_short_file_reads_as_zeros(files: SumFiles, tmp_path: Path) -> None:
    assert not files.read(9, np.array([3, 1]), 4).any()
    files.write(9, np.arange(4), np.full((4, 4), 7, dtype=np.uint64), False)
    os.truncate(tmp_path / "sums" / "000009.sum", 2 * 32 + 5)
    assert files.read(9, np.array([3, 1, 2]), 4).any(axis=1).tolist() == [False, True, False]
    assert files.read(9, np.array([], dtype=np.int64), 4).shape == (0, 4)


def test_a_dropped_file_is_gone_and_dropping_twice_is_fine(files: SumFiles, tmp_path: Path) -> None:
    files.write(9, np.arange(4), np.full((4, 4), 7, dtype=np.uint64), False)
    files.drop(9)
    files.drop(9)
    assert os.listdir(tmp_path / "sums") == []
