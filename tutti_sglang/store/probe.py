"""Whether a directory takes direct I/O: found out by a real aligned write, read and compare."""

import contextlib
import errno
import os
import secrets

from tutti_sglang.errors import StoreError
from tutti_sglang.memory import PAGE, Region

PREFIX = ".probe-"


def direct_io(directory: int) -> str:
    """Why the open directory does not take O_DIRECT; empty when it does. OSError when it takes no writes at all."""
    name = PREFIX + secrets.token_hex(8)
    pattern = secrets.token_bytes(PAGE)
    region = Region(PAGE)
    try:
        region.view[:] = memoryview(pattern)
        try:
            fd = _create(directory, name, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(_create(directory, name, 0))  # tells "no O_DIRECT" from "no writing"
            return f"open with O_DIRECT: {error.strerror}"
        try:
            return _round_trip(fd, region, pattern)
        finally:
            os.close(fd)
    finally:
        region.close()
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def choose(directory: int, setting: str, where: str) -> tuple[bool, str]:
    """(direct, why not) for the setting `direct_io` = auto | required | off. StoreError, OSError."""
    if setting == "off":
        direct_io(directory)
        return False, "direct_io = off"
    reason = direct_io(directory)
    if reason and setting == "required":
        raise StoreError(
            f"{where} does not take direct I/O ({reason})",
            "Use another file system (ext4, xfs), or set direct_io to auto to go through the page cache",
        )
    return not reason, reason


def _create(directory: int, name: str, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=directory)


def _round_trip(fd: int, region: Region, pattern: bytes) -> str:
    try:
        written = os.pwritev(fd, [region.view.data], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise
        return f"write with O_DIRECT: {error.strerror}"
    region.view[:] = 0
    read = os.preadv(fd, [region.view.data], 0)
    if written != PAGE or read != PAGE or region.view.tobytes() != pattern:
        return "what was written with O_DIRECT did not come back"
    return ""
