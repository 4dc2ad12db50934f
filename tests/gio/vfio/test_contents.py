"""A drive with anything on it is told from an empty one, and by its name where it has one."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tutti_sglang.gio.vfio import contents

SIZE = 64 << 20


class Image:
    """A drive's bytes, mostly zeros."""

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self.path = path
        with open(path, "wb") as file:
            file.truncate(size)

    def put(self, offset: int, data: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def read(self, offset: int, size: int) -> bytes:
        assert offset % 4096 == size % 4096 == 0
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def find(self) -> str:
        return contents.find(self.read, self.path.stat().st_size)


@pytest.mark.parametrize("size", [4096, 1 << 20, SIZE])
def test_an_empty_drive_is_empty(tmp_path: Path, size: int) -> None:
    assert Image(tmp_path / "drive", size).find() == ""


@pytest.mark.parametrize("mark", contents.MARKS)
def test_every_mark_is_found(tmp_path: Path, mark: contents.Mark) -> None:
    image = Image(tmp_path / "drive")
    image.put(mark.offset if mark.offset >= 0 else SIZE + mark.offset, mark.magic)
    assert image.find() == mark.name


@pytest.mark.parametrize(
    ("tool", "arguments", "name"),
    [
        ("mkfs.ext4", ["-q", "-F"], "an ext2/3/4 file system"),
        ("mkswap", [], "swap space"),
        ("mkfs.xfs", ["-q"], "an XFS file system"),
        ("mkfs.btrfs", ["-q"], "a Btrfs file system"),
        ("mkfs.vfat", [], "a FAT file system"),
    ],
)
def test_what_a_real_tool_made_is_found(tmp_path: Path, tool: str, arguments: list[str], name: str) -> None:
    command = shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin")
    if command is None:
        pytest.skip(f"{tool} is not installed")
    image = Image(tmp_path / "drive", 512 << 20)
    subprocess.run([command, *arguments, image.path], check=True, capture_output=True, timeout=60)
    assert image.find() == name


@pytest.mark.parametrize("offset", [0, 5000, contents.EDGE - 1, SIZE - contents.EDGE, SIZE - 1])
def test_any_byte_on_either_end_is_something(tmp_path: Path, offset: int) -> None:
    image = Image(tmp_path / "drive")
    image.put(offset, b"\x01")
    assert image.find() == f"something at byte {offset}"


def test_data_without_a_head_is_found_by_samples(tmp_path: Path) -> None:
    image = Image(tmp_path / "drive")
    image.put(contents.EDGE, b"\x55" * (SIZE // 8))
    assert image.find() == f"something at byte {contents.EDGE}"
    for at in contents.samples(SIZE):
        other = Image(tmp_path / "other")
        other.put(at + 7, b"\x55")
        assert other.find() == f"something at byte {at + 7}"
        if at > contents.EDGE + 3 * contents.SAMPLE:
            break


def test_samples_of_a_large_drive_are_few_and_reach_from_end_to_end() -> None:
    size = 4 << 40
    places = contents.samples(size)
    assert contents.SAMPLES <= len(places) <= contents.SAMPLES + 1
    assert places[0] == contents.EDGE
    assert places[-1] > size - 2 * (size // contents.SAMPLES)
    assert all(at % contents.SAMPLE == 0 for at in places)
