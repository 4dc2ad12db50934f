"""The stand-in of a segment's file says where its blocks begin, and has the segment's size."""

import os
from pathlib import Path

import pytest

from tutti_sglang.errors import EngineError
from tutti_sglang.gio.vfio import extent


@pytest.mark.parametrize("start", [0, 4096, 1 << 20, (1 << 50) + 4096])
def test_what_was_written_is_read(tmp_path: Path, start: int) -> None:
    fd = os.open(tmp_path / "000001.seg", os.O_RDWR | os.O_CREAT)
    extent.write(fd, start, 256 << 20)
    assert extent.read(fd) == start
    assert os.fstat(fd).st_size == 256 << 20
    assert os.fstat(fd).st_blocks * 512 <= 64 << 10, "it takes no room"
    os.close(fd)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 4096, b"tutti raw extent \n", b"tutti raw extent -1\n", b"tutti raw extent 12"[:17]]
)
def test_any_other_file_names_no_blocks(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "000001.seg"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(EngineError, match="names no blocks"):
        extent.read(fd)
    os.close(fd)
