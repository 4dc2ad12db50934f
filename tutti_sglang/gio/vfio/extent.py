"""The stand-in for a segment's file where the segment is a range of blocks of a raw drive: a sparse file of the
segment's size that says where the range begins. So names, sizes, listing and removal are those of files, crash safe as
they are."""

import os

from tutti_sglang.errors import EngineError

_MAGIC = b"tutti raw extent "
_ROOM = 64


def write(fd: int, start: int, size: int) -> None:
    """Make the open, empty file stand for `size` bytes of the drive from byte `start` on. OSError."""
    os.ftruncate(fd, size)
    os.pwrite(fd, _MAGIC + b"%d\n" % start, 0)


def read(fd: int) -> int:
    """Where the range begins, in bytes of the drive. EngineError when the file is no such stand-in."""
    text = os.pread(fd, _ROOM, 0)
    number = text.removeprefix(_MAGIC).partition(b"\n")[0]
    if not text.startswith(_MAGIC) or not number.isdigit():
        raise EngineError("A segment of a raw drive has a file that names no blocks", "Run: tutti verify --repair")
    return int(number)
