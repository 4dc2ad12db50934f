"""The superblock: what was written is read, and nothing else is taken for one."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.errors import ForeignStoreError
from tutti_sglang.store import superblock
from tutti_sglang.store.superblock import DRIVES_MAX, FORMAT, Superblock


@given(st.integers(0, DRIVES_MAX - 1), st.integers(256, 1 << 20))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, drive: int, blocks: int) -> None:
    home = tmp_path_factory.mktemp("drive")
    fd = os.open(home, os.O_RDONLY)
    assert superblock.read(fd, "here") is None
    block = Superblock(format=FORMAT, store="ab" * 16, drive=drive, segment_size=4096 * blocks)
    superblock.write(fd, block)
    assert superblock.read(fd, "here") == block.sealed()
    assert os.listdir(home) == [superblock.NAME]
    os.close(fd)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ForeignStoreError, match="here"):
        superblock.parse(data, "here")


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    block = Superblock(format=FORMAT, store="ab" * 16, drive=3, segment_size=1 << 28).sealed()
    superblock.write(fd, block)
    os.close(fd)
    data = (tmp_path / superblock.NAME).read_bytes()
    random.seed(1)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        try:
            found = superblock.parse(changed, "here")
        except ForeignStoreError:
            continue
        assert found == block, f"byte {at} of {data!r}"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "format": st.integers() | st.text(),
            "store": st.text(),
            "drive": st.integers(),
            "segment_size": st.integers(),
            "check": st.text(),
        },
    )
)
def test_any_json_object_but_a_sealed_one_is_refused(fields: dict[str, object]) -> None:
    import msgspec

    with pytest.raises(ForeignStoreError):
        superblock.parse(msgspec.json.encode(fields), "here")
