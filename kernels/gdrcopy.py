"""A CPU mapping of GPU memory through GDRCopy (libgdrapi, gdrdrv), where an administrator installed it."""

import ctypes
import os
from functools import cache

import numpy as np
import numpy.typing as npt

from tutti_sglang.errors import EngineError
from tutti_sglang.memory import view

GPU_PAGE = 64 << 10
"""Bytes: GPU memory is pinned in such pages."""

_FENCE = 8  # bytes behind the mapped memory that only `flush` writes


class _Handle(ctypes.Structure):
    _fields_ = (("h", ctypes.c_ulong),)


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if not os.path.exists("/dev/gdrdrv"):
        return None, "the kernel module gdrdrv is not loaded"
    try:
        library = ctypes.CDLL("libgdrapi.so.2")
    except OSError as error:
        return None, f"libgdrapi cannot be loaded: {error}"
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.gdr_open.restype = pointer
    library.gdr_pin_buffer.argtypes = (
        pointer,
        ctypes.c_ulong,
        size,
        ctypes.c_uint64,
        ctypes.c_uint32,
        ctypes.POINTER(_Handle),
    )
    library.gdr_map.argtypes = (pointer, _Handle, ctypes.POINTER(pointer), size)
    library.gdr_copy_to_mapping.argtypes = (_Handle, pointer, pointer, size)
    library.gdr_unmap.argtypes = (pointer, _Handle, pointer, size)
    library.gdr_unpin_buffer.argtypes = (pointer, _Handle)
    library.gdr_close.argtypes = (pointer,)
    return library, ""


def unavailable_reason() -> str:
    """Why there is no GDRCopy here; empty when there is."""
    return _load()[1]


class Mapping:
    """`size` bytes of GPU memory: at `address` for the GPU, as `view` for the CPU, which should only write there: reads
    cross the bus one by one, writes are combined."""

    def __init__(self, address: int, size: int) -> None:
        """`address`: a multiple of GPU_PAGE, with room for `padded(size)` bytes. Raises EngineError."""
        library, reason = _load()
        if library is None:
            raise EngineError(f"GDRCopy cannot be used: {reason}", "Keep the IOCB ring in pinned host memory")
        assert address % GPU_PAGE == 0
        self.address, self.size, self._mapped = address, size, padded(size)
        self._library, self._session = library, library.gdr_open()
        if not self._session:
            raise EngineError("gdr_open failed", "Check the permissions of /dev/gdrdrv")
        self._handle, self._start = _Handle(), ctypes.c_void_p()
        pinned = library.gdr_pin_buffer(self._session, address, self._mapped, 0, 0, ctypes.byref(self._handle))
        if pinned or library.gdr_map(self._session, self._handle, ctypes.byref(self._start), self._mapped):
            library.gdr_close(self._session)
            raise EngineError("GDRCopy cannot map this GPU's memory", "Its BAR1 may be too small or in use")
        assert self._start.value
        self.view: npt.NDArray[np.uint8] = view(self._start.value, size)

    def flush(self) -> None:
        """Let everything written to `view` by this thread arrive before what this thread does next: GDRCopy's own copy
        ends with the store fence that write-combined stores need."""
        word = ctypes.c_uint64(0)
        end = (self._start.value or 0) + self._mapped - _FENCE
        self._library.gdr_copy_to_mapping(self._handle, end, ctypes.byref(word), _FENCE)

    def close(self) -> None:
        """Unmap; before the GPU memory is freed."""
        self.view = np.empty(0, dtype=np.uint8)
        self._library.gdr_unmap(self._session, self._handle, self._start, self._mapped)
        self._library.gdr_unpin_buffer(self._session, self._handle)
        self._library.gdr_close(self._session)


def padded(size: int) -> int:
    """Bytes that a mapping of `size` takes."""
    return -(-(size + _FENCE) // GPU_PAGE) * GPU_PAGE
