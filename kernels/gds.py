"""GPUDirect Storage on this machine: what cuFile would really do, why not something better, and its calls, thinly."""

import enum
import errno
import threading
from pathlib import Path
from typing import Any, NamedTuple

from tutti_sglang.errors import EngineError

NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")


class Mode(enum.StrEnum):
    """How bytes would go. COMPAT is what cuFile falls back to: through host memory, as the stream mover does itself."""

    NVIDIA_FS = "nvidia-fs"
    P2PDMA = "P2PDMA"
    COMPAT = "compat"
    NONE = "none"


class Found(NamedTuple):
    """The mode, and for people why it is no better one: cuFile's code and what to do about it."""

    mode: Mode
    reason: str


def probe() -> Found:
    """Open cuFile's driver once, and close it again. Raises nothing; cuFile itself may write to stderr."""
    try:
        from cuda.bindings import cufile
    except Exception as error:  # noqa: BLE001 - a library that is missing raises what it likes
        return Found(Mode.NONE, f"cuda.bindings has no cuFile here ({error}): pip install nvidia-cufile")
    try:
        cufile.driver_open()
    except Exception as error:  # noqa: BLE001
        return Found(Mode.NONE, f"cuFile does not start: {_told(error)}")
    try:
        return _mode(cufile)
    except Exception as error:  # noqa: BLE001
        return Found(Mode.NONE, f"cuFile does not say what it does: {_told(error)}")
    finally:
        cufile.driver_close()


def _mode(cufile: Any) -> Found:
    if NVIDIA_FS.exists():
        return Found(Mode.NVIDIA_FS, "")
    if cufile.get_parameter_bool(cufile.BoolConfigParameter.USE_PCIP2PDMA):
        return Found(Mode.P2PDMA, "")
    return Found(
        Mode.COMPAT, "nvidia-fs is not loaded and use_pci_p2pdma is off: modprobe nvidia-fs, or set it in cufile.json"
    )


def _told(error: Exception) -> str:
    """cuFile's words, with its code; what to look at where it is known."""
    text = str(error) or type(error).__name__
    if "5033" in text or "5001" in text:
        return f"{text}; is there a GPU with its driver, and is nvidia-fs loaded (modprobe nvidia-fs)?"
    return text


_OP_ERROR = 5000
"""CUfileOpError starts here; cuda.bindings raises what is less where cuFile says -1, and means errno by it."""

_ERRNOS = {
    errno.EOPNOTSUPP: (5007, 5008, 5009, 5034, 5038),  # platform, I/O, device not supported; I/O disabled
    errno.EFAULT: (*range(5012, 5018), 5023, 5024, 5036),  # memory: pointer, range, context, mapping, registration
    errno.EINVAL: (5018, 5019, 5020, 5022),  # file type, open flags, no O_DIRECT, value
    errno.EACCES: (5025,),
    errno.EBADF: (5027, 5028),
    errno.ENODEV: (5001, 5006, 5029),
    errno.EAGAIN: (5035, 5037),  # a batch is full
}


def errno_of(error: Exception) -> int:
    """The errno that says the same as cuFile's error; EIO where none does."""
    status = getattr(error, "status", 0)
    if 0 < status < _OP_ERROR:
        return int(status)
    return next((number for number, codes in _ERRNOS.items() if status in codes), errno.EIO)


class CuFile:
    """cuFile for files that stay open and device memory that stays registered. Thread safe; it blocks without the
    GIL."""

    def __init__(self, library: Any = None, driver: Any = None) -> None:
        """On a thread whose CUDA context is that of the memory. EngineError. `library`, `driver`: instead of
        cuda.bindings' cufile and driver."""
        try:
            if library is None:
                from cuda.bindings import cufile
                from cuda.bindings import driver as cuda

                library, driver = cufile, cuda
            self._library, self._driver = library, driver
            self._context = driver.cuCtxGetCurrent()[1]
            self._thread = threading.local()
            library.driver_open()
        except Exception as error:
            raise EngineError(f"cuFile does not start: {_told(error)}", "Run: tutti doctor") from error

    def register_memory(self, address: int, size: int) -> None:
        """Device memory for `move`, until `forget_memory`. EngineError."""
        try:
            self._library.buf_register(address, size, 0)
        except Exception as error:
            raise EngineError(f"cuFile does not take {size} bytes of device memory: {_told(error)}") from error

    def forget_memory(self, address: int) -> None:
        """No I/O may be in flight there."""
        self._library.buf_deregister(address)

    def register_file(self, fd: int) -> int:
        """cuFile's handle of an open file, until `forget_file`. EngineError."""
        descr = self._library.Descr()
        descr.type, descr.handle.fd = self._library.FileHandleType.OPAQUE_FD, fd
        try:
            return int(self._library.handle_register(descr.ptr))
        except Exception as error:
            raise EngineError(f"cuFile does not take a segment file: {_told(error)}") from error

    def forget_file(self, handle: int) -> None:
        """No I/O may be in flight there; before the file is closed."""
        self._library.handle_deregister(handle)

    def move(self, write: bool, handle: int, base: int, size: int, offset: int, place: int) -> int:
        """`size` bytes between `offset` of the file and byte `place` of the memory registered at `base`: how many were
        moved, or -errno. Returns when the drive does not touch the memory any more."""
        self._enter()
        try:
            call = self._library.write if write else self._library.read
            return int(call(handle, base, size, offset, place))
        except Exception as error:  # noqa: BLE001
            return -errno_of(error)

    def close(self) -> None:
        """Nothing is registered any more."""
        self._library.driver_close()

    def _enter(self) -> None:
        """A thread of ours has no context of its own, and cuFile goes by the current one."""
        if not getattr(self._thread, "entered", False):
            self._driver.cuCtxSetCurrent(self._context)
            self._thread.entered = True
