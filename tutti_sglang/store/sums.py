"""Tensor checksums at rest: `sums/NNNNNN.sum` in the index directory, one row of u64 per slot of a segment.

The index holds only the root of a row: enough to check a whole object. The row is for whoever reads single tensors, and
tells which drive spoiled one.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tutti_sglang.checksum import Sums
from tutti_sglang.store import directory

_Within = npt.NDArray[np.int64]


class SumFiles:
    """Slots here are numbers within their segment. Files are opened for each call: that costs less than keeping
    them."""

    def __init__(self, index_dir: int) -> None:
        self._directory = directory.open_subdirectory(index_dir, directory.SUMS)

    def write(self, segment: int, within: _Within, rows: Sums, sync: bool) -> None:
        """Store `rows` ((n, T)) for the slots `within` ((n,)), one write per run of consecutive slots. OSError."""
        width = rows.shape[1] * 8
        order = np.argsort(within)
        within, rows = within[order], rows[order].astype("<u8", copy=False)
        cuts = [0, *(np.flatnonzero(np.diff(within) != 1) + 1).tolist(), len(within)]
        with self._open(segment, os.O_WRONLY | os.O_CREAT) as fd:
            for start, end in pairwise(cuts):
                data = rows[start:end].tobytes()
                if os.pwrite(fd, data, int(within[start]) * width) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fdatasync(fd)

    def read(self, segment: int, within: _Within, tensors: int) -> Sums:
        """(n, T) rows of the slots `within`, zeros where the file is missing or short. One read for all."""
        table = np.zeros((len(within), tensors), dtype=np.uint64)
        if not len(within):
            return table
        low, high, width = int(within.min()), int(within.max()) + 1, tensors * 8
        with contextlib.suppress(OSError), self._open(segment, os.O_RDONLY) as fd:
            data = os.pread(fd, (high - low) * width, low * width)
            rows = np.frombuffer(data[: len(data) // width * width], dtype="<u8").reshape(-1, tensors)
            there = within - low < len(rows)
            table[there] = rows[within[there] - low]
        return table

    def drop(self, segment: int) -> None:
        """Remove the segment's file; that it is not there is fine."""
        with contextlib.suppress(OSError):
            os.unlink(_name(segment), dir_fd=self._directory)

    def segments(self) -> set[int]:
        """The segments that have a file."""
        with contextlib.suppress(OSError):
            names = os.listdir(self._directory)
            return {int(name[:-4]) for name in names if name.endswith(".sum") and name[:-4].isdecimal()}
        return set()

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._directory)

    @contextlib.contextmanager
    def _open(self, segment: int, flags: int) -> Iterator[int]:
        fd = os.open(_name(segment), flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        try:
            yield fd
        finally:
            os.close(fd)


def _name(segment: int) -> str:
    return f"{segment:06d}.sum"
