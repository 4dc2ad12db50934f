"""Memory that ends at a page nobody may touch: a transfer one byte too long is a crash, not a silent overwrite."""

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

from tutti_sglang.memory import PAGE, Region
from tutti_sglang.units import align_up

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class GuardedRegion(Region):
    """A Region whose last byte is the last one that may be touched."""

    def __init__(self, size: int) -> None:
        super().__init__(align_up(size, PAGE) + PAGE)
        self.size -= PAGE
        self._guard = self.address + self.size
        self._protect(_PROT_NONE)
        self.view = self.view[: self.size]

    def tail(self, size: int) -> npt.NDArray[np.uint8]:
        """(size,) the last bytes of the region; any alignment."""
        return self.view[self.size - size :]

    def close(self) -> None:
        """Open the guard page and forget the memory."""
        if self.address:
            self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        super().close()

    def _protect(self, protection: int) -> None:
        if _libc.mprotect(self._guard, PAGE, protection):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
