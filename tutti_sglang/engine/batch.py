"""The I/O context: one read or write, 32 bytes, the same in Python, C++ and CUDA."""

import enum
import errno
import itertools

import numpy as np
import numpy.typing as npt

IOCTX_DTYPE = np.dtype(
    [
        ("address", "<u8"),  # memory
        ("offset", "<u8"),  # in the drive's own space: segment number x segment_size + place in the segment's file
        ("length", "<u4"),  # bytes; an IOCTX never crosses a segment
        ("result", "<i4"),  # bytes moved or -errno
        ("drive", "<u2"),  # ordinal
        ("operation", "u1"),  # Operation
        ("class", "u1"),  # IoClass
        ("tag", "<u4"),  # the caller's own
    ]
)
assert IOCTX_DTYPE.itemsize == 32

Batch = npt.NDArray[np.void]
"""(n,) IOCTX_DTYPE."""

Results = npt.NDArray[np.int32]
"""(n,) bytes moved or -errno per IOCTX."""

IN_PROGRESS = -errno.EINPROGRESS
"""The result of an IOCTX that is not done: its memory still belongs to the engine."""


class Operation(enum.IntEnum):
    """What an IOCTX does."""

    READ = 0
    WRITE = 1


class IoClass(enum.IntEnum):
    """Who waits for an I/O; smaller starts first."""

    DEMAND = 0
    PRELOAD = 1
    WRITE = 2


_serial = itertools.count(1)


class Ticket:
    """One submitted batch. Engines keep their own state in a subclass; callers only hand it back."""

    def __init__(self, batch: Batch) -> None:
        self.serial = next(_serial)
        self.batch = batch
