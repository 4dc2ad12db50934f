"""The seam between an engine and the kernel: one vectored read or write. Faults are injected here and nowhere else."""

import ctypes
import errno
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import Operation

Iovecs = npt.NDArray[np.uint64]
"""(k, 2) address and bytes of each piece of memory: an array of the kernel's `struct iovec`."""


class Place(NamedTuple):
    """Where a transfer goes: `fd` at `offset`, which is byte `drive_offset` of the space of drive `drive`."""

    fd: int
    offset: int
    drive: int
    drive_offset: int

    def after(self, moved: int) -> "Place":
        """`moved` bytes further on."""
        return self._replace(offset=self.offset + moved, drive_offset=self.drive_offset + moved)


def head(iovecs: Iovecs, size: int) -> Iovecs:
    """The first `size` bytes of the memory; all of it when there is less."""
    before = np.cumsum(iovecs[:, 1]) - iovecs[:, 1]
    kept = iovecs[before < size].copy()
    kept[:, 1] = np.minimum(kept[:, 1], np.uint64(size) - before[: len(kept)])
    return kept


def tail(iovecs: Iovecs, size: int) -> Iovecs:
    """The memory without its first `size` bytes."""
    ends = np.cumsum(iovecs[:, 1])
    kept = iovecs[ends > size].copy()
    if len(kept):
        begun = np.uint64(size) - (ends[-len(kept)] - kept[0, 1])
        kept[0, 0] += begun
        kept[0, 1] -= begun
    return kept


class Seam(Protocol):
    """What an engine asks of the system."""

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        """Move at most all bytes of `iovecs`; return how many, or -errno. Blocks, without the GIL."""


class System:
    """preadv(2) and pwritev(2), called with an array of iovecs: no Python object per piece of memory."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._calls = {Operation.READ: libc.preadv64, Operation.WRITE: libc.pwritev64}
        for call in self._calls.values():
            call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
            call.restype = ctypes.c_ssize_t

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        """As Seam.transfer; a call that a signal interrupted is repeated."""
        call = self._calls[operation]
        while True:
            moved: int = call(place.fd, iovecs.ctypes.data, len(iovecs), place.offset)
            if moved >= 0:
                return moved
            if (error := ctypes.get_errno()) != errno.EINTR:
                return -error


SYSTEM = System()
