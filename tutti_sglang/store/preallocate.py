"""Real extents for a new file: by fallocate, or by writing zeros where the file system has none."""

import ctypes
import errno
import os

_ZEROS = bytes(1 << 20)
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def preallocate(fd: int, size: int) -> None:
    """Give an empty file its `size` bytes. OSError."""
    try:
        fallocate(fd, size)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        write_zeros(fd, size)


def fallocate(fd: int, size: int) -> None:
    """fallocate(2) itself: posix_fallocate would not say that it is emulated. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def write_zeros(fd: int, size: int) -> None:
    """OSError."""
    for at in range(0, size, len(_ZEROS)):
        piece = _ZEROS[: size - at]
        if os.pwrite(fd, piece, at) != len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
