"""A raw drive: an NVMe namespace behind VFIO in the place of a directory. Its segments are ranges of blocks; their
names, sizes and places lie as stand-ins of files in the index directory (gio/vfio/extent.py)."""

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from typing import ClassVar

from tutti_sglang.config import Config, raw_name
from tutti_sglang.errors import EngineError, ForeignStoreError
from tutti_sglang.gio.vfio import contents, extent
from tutti_sglang.gio.vfio.drive import VfioDrive
from tutti_sglang.gio.vfio.iommu import AddressSpace, address_space
from tutti_sglang.store import directory, probe, superblock
from tutti_sglang.store.drives import Drive, Found
from tutti_sglang.store.superblock import Superblock
from tutti_sglang.units import align_down, format_size

CHECK = 4096
"""Byte of the drive at which the block lies that it is tried with; the superblock is at 0, out of the mover's reach."""

DATA = 1 << 20
"""… and from which on it is cut into places of segment_size bytes each."""

_HEAD = 4096


@dataclass(kw_only=True)
class RawDrive(Drive):
    """All of it is the store's, and one process owns it. `device`: closed with it."""

    device: VfioDrive
    segment_size: int
    share: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        """It has no directory that could be exchanged."""

    def free(self) -> int:
        """As Drive.free: places that no segment has."""
        return len(self._free_places()) * self.segment_size

    def present(self) -> bool:
        """As Drive.present: an unplugged drive answers with errors."""
        return True

    def allocate(self, fd: int, size: int) -> bool:
        """As Drive.allocate: give the file a place. OSError (ENOSPC)."""
        assert size <= self.segment_size
        free = self._free_places()
        if not free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extent.write(fd, free[0], size)
        return True

    def sync(self, fd: int) -> None:
        """As Drive.sync: the drive's own cache is emptied. OSError."""
        self.device.flush()

    def close(self) -> None:
        """As Drive.close."""
        super().close()
        self.device.close()

    def describe(self, used: int) -> str:
        """As Drive.describe."""
        return f"{self.ordinal} {self.path}: {format_size(used)} of {format_size(self.limit)}, {self.device.describe()}"

    def _free_places(self) -> list[int]:
        """Where places begin that no file stands for and no segment is attached at, whose file may be gone already."""
        taken = set(self.device.attached.values())
        for name in os.listdir(self.segments):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.segments)
            try:
                with contextlib.suppress(EngineError):  # it is being made, and names no place yet
                    taken.add(extent.read(fd))
            finally:
                os.close(fd)
        end = DATA + align_down(self.device.facts.size - DATA, self.segment_size)
        return [start for start in range(DATA, end, self.segment_size) if start not in taken]


def look(found: Found, config: Config, space: AddressSpace | None) -> None:
    """As drives.scan does with a directory. `space`: of the raw drives that were opened before. ForeignStoreError,
    EngineError, OSError."""
    name = raw_name(found.path)
    assert name is not None
    device = VfioDrive(space or address_space(), name)
    try:
        found.block = _superblock(device, found.path, config)
        serial = re.sub(r"\W", "_", device.controller.facts.serial)
        folder = config.index_path / directory.RAW / f"{serial}-{device.nsid}"
        found.fd = directory.open_directory(str(folder))
    except BaseException:
        device.close()
        raise
    found.device = device


def open_drive(found: Found, block: Superblock) -> RawDrive:
    """Bring it into use; a new one gets its superblock. The device is the drive's now. OSError."""
    device = found.device
    assert isinstance(device, VfioDrive)
    if found.block is None:
        device.write(0, superblock.encode(block).ljust(_HEAD, b"\0"))
        device.write(CHECK, probe.PATTERN.tobytes())
        device.flush()
    segments = directory.open_subdirectory(found.fd, directory.SEGMENTS)
    try:
        fd = os.open(probe.CHECK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=segments)
        try:
            extent.write(fd, CHECK, len(probe.PATTERN))
        finally:
            os.close(fd)
    except BaseException:
        os.close(segments)
        raise
    found.device = None
    return RawDrive(block.drive, found.path, segments, False, "", 0, device=device, segment_size=block.segment_size)


def _superblock(device: VfioDrive, path: str, config: Config) -> Superblock | None:
    """Its superblock; None for an empty drive, or one that may be overwritten. ForeignStoreError for any other."""
    head = device.read(0, _HEAD).rstrip(b"\0")
    if head.startswith(b"{"):
        return superblock.parse(head, path)
    serial = device.controller.facts.serial
    there = contents.find(device.read, device.facts.size)
    if there and serial not in config.overwrite:
        raise ForeignStoreError(
            f"{path} ({device.controller.facts.model}, serial {serial}) is not empty: it holds {there}",
            f"Nothing was written. If nothing on it is needed, discard it (give it back to the nvme driver, then: "
            f'blkdiscard /dev/nvmeXnY), or set overwrite to ["{serial}"]',
        )
    return None
