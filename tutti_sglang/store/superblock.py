"""The superblock: the file `TUTTI` that says which store and which drive of it a directory is."""

import os

import msgspec
import xxhash

from tutti_sglang.errors import ForeignStoreError
from tutti_sglang.geometry import ALIGNMENT

NAME = "TUTTI"
FORMAT = 3
DRIVES_MAX = 1 << 16
"""Ordinals fit in an IOCTX's u16."""

_SIZE_MAX = 4096
_HINT = "If nothing in it is needed, empty the directory; if it is, take it out of storage_dirs"


class Superblock(msgspec.Struct, frozen=True, kw_only=True):
    """`store`: 32 hex digits; `drive`: ordinal; `segment_size`: bytes, the same on all drives; `check`: XXH3-64 of
    the rest, hex."""

    format: int
    store: str
    drive: int
    segment_size: int
    check: str = ""

    def sealed(self) -> "Superblock":
        """The same with its `check` filled in."""
        text = f"{self.format} {self.store} {self.drive} {self.segment_size}"
        return msgspec.structs.replace(self, check=xxhash.xxh3_64_hexdigest(text.encode()))


class _Version(msgspec.Struct):
    format: int


def parse(data: bytes, where: str) -> Superblock:
    """The superblock in `data`; ForeignStoreError names `where` and says what to do."""
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise ForeignStoreError(
                f"{where} holds a store of format {version}; this version of tutti-sglang reads format {FORMAT}", _HINT
            )
        block = msgspec.json.decode(data, type=Superblock)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignStoreError(f"The superblock {where}/{NAME} is damaged ({error})", _HINT) from error
    if block.sealed() != block or not 0 <= block.drive < DRIVES_MAX or not _plausible(block.segment_size):
        raise ForeignStoreError(f"The superblock {where}/{NAME} is damaged (its checksum does not fit)", _HINT)
    return block


def read(directory: int, where: str) -> Superblock | None:
    """The superblock of the open directory; None when it has none. ForeignStoreError, OSError."""
    try:
        fd = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        return parse(os.read(fd, _SIZE_MAX), where)
    finally:
        os.close(fd)


def encode(block: Superblock) -> bytes:
    """What `parse` reads."""
    return msgspec.json.format(msgspec.json.encode(block.sealed())) + b"\n"


def write(directory: int, block: Superblock) -> None:
    """Put the superblock into the open directory, whole or not at all, and on the disk before it returns."""
    draft = f".{NAME}-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600, dir_fd=directory)
    try:
        os.write(fd, encode(block))
        os.fsync(fd)  # before the rename: else a power cut leaves the name with no content
    finally:
        os.close(fd)
    os.rename(draft, NAME, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def _plausible(segment_size: int) -> bool:
    return segment_size >= 1 << 20 and segment_size % ALIGNMENT == 0
