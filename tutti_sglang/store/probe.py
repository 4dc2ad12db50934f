"""What a directory can do: direct I/O, found out by a real aligned write, read and compare; and a file to try it with
later."""

import contextlib
import errno
import os
import secrets

import numpy as np

from tutti_sglang.errors import StoreError
from tutti_sglang.memory import PAGE, Region

PREFIX = ".probe-"
CHECK = ".check"
PATTERN = np.random.default_rng(0x5455545449).integers(0, 256, PAGE, dtype=np.uint8)
"""Content of the file CHECK, which every drive has, for trying the drive when it is out of service."""


def direct_io(directory: int) -> str:
    """Why the open directory does not take O_DIRECT; empty when it does. OSError when it takes no writes at all."""
    name = PREFIX + secrets.token_hex(8)
    region = Region(PAGE)
    region.view[:] = PATTERN
    try:
        os.close(_open(directory, name, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        try:
            fd = _open(directory, name, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            return f"open with O_DIRECT: {error.strerror}"
        try:
            return _round_trip(fd, region)
        finally:
            os.close(fd)
    finally:
        region.close()
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def choose(directory: int, setting: str, where: str) -> tuple[bool, str]:
    """(direct, why not) for the setting `direct_io` = auto | required | off. StoreError, OSError."""
    reason = direct_io(directory)
    if setting == "off":
        return False, "direct_io = off"
    if reason and setting == "required":
        raise StoreError(
            f"{where} does not take direct I/O ({reason})",
            "Use another file system (ext4, xfs), or set direct_io to auto to go through the page cache",
        )
    return not reason, reason


def leave_check(directory: int) -> None:
    """Make the file CHECK unless it is there. OSError."""
    fd = _open(directory, CHECK, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(fd).st_size < PAGE:
            os.pwrite(fd, PATTERN.tobytes(), 0)
    finally:
        os.close(fd)


def open_check(directory: int, writing: bool, direct: bool) -> int:
    """The file CHECK. OSError."""
    return _open(directory, CHECK, (os.O_RDWR if writing else os.O_RDONLY) | (os.O_DIRECT if direct else 0))


def _open(directory: int, name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)


def _round_trip(fd: int, region: Region) -> str:
    try:
        written = os.pwritev(fd, [region.view.data], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise
        return f"write with O_DIRECT: {error.strerror}"
    region.view[:] = 0
    read = os.preadv(fd, [region.view.data], 0)
    if written != PAGE or read != PAGE or not (region.view == PATTERN).all():
        return "what was written with O_DIRECT did not come back"
    return ""
