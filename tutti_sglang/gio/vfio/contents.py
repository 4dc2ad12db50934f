"""What lies on a drive that nobody told us to overwrite: found by the marks that file systems, partition tables and
volume managers leave, and by any byte that is not zero. Pure, but for the function that reads."""

from collections.abc import Callable
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20
EDGE = 4 * MIB
"""Bytes looked at on either end: LUKS keeps a second header there, ZFS four labels, MD its superblock."""

SAMPLES = 256
SAMPLE = 4096
"""… and between the ends so many pieces of that size, evenly."""

Read = Callable[[int, int], bytes]
"""(offset, size) → bytes, both multiples of 4 KiB."""


class Mark(NamedTuple):
    """`offset`: of the magic; negative = from the end."""

    name: str
    offset: int
    magic: bytes


# Offsets and magics as in util-linux, libblkid/src/superblocks and partitions.
MARKS = (
    Mark("a GUID partition table", 512, b"EFI PART"),
    Mark("a GUID partition table", 4096, b"EFI PART"),
    Mark("a GUID partition table (its copy)", -512, b"EFI PART"),
    Mark("a GUID partition table (its copy)", -4096, b"EFI PART"),
    Mark("a LUKS volume", 0, b"LUKS\xba\xbe"),
    Mark("a LUKS volume (its copy)", 16 * KIB, b"SKUL\xba\xbe"),
    Mark("a BitLocker volume", 3, b"-FVE-FS-"),
    *(Mark("an LVM physical volume", sector * 512, b"LABELONE") for sector in range(4)),
    Mark("an MD RAID member", 0, b"\xfc\x4e\x2b\xa9"),
    Mark("an MD RAID member", 4096, b"\xfc\x4e\x2b\xa9"),
    *(
        Mark("a ZFS pool member", label + 128 * KIB + at, magic)
        for label in (0, 256 * KIB, -512 * KIB, -256 * KIB)
        for at in (0, 4096)
        for magic in (b"\x0c\xb1\xba\0\0\0\0\0", b"\0\0\0\0\0\xba\xb1\x0c")
    ),
    Mark("an ext2/3/4 file system", 1080, b"\x53\xef"),
    Mark("an XFS file system", 0, b"XFSB"),
    Mark("a Btrfs file system", 64 * KIB + 64, b"_BHRfS_M"),
    Mark("an F2FS file system", 1024, b"\x10\x20\xf5\xf2"),
    Mark("a bcachefs or bcache device", 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    Mark("an NTFS file system", 3, b"NTFS    "),
    Mark("an exFAT file system", 3, b"EXFAT   "),
    Mark("a FAT file system", 54, b"FAT1"),
    Mark("a FAT file system", 82, b"FAT32   "),
    Mark("swap space", 4086, b"SWAPSPACE2"),
    Mark("an ISO 9660 file system", 32 * KIB + 1, b"CD001"),
    Mark("an APFS container", 32, b"NXSB"),
    Mark("a SquashFS file system", 0, b"hsqs"),
    Mark("an EROFS file system", 1024, b"\xe2\xe1\xf5\xe0"),
    Mark("a Ceph BlueStore device", 0, b"bluestore block device"),
    Mark("a DRBD or GFS2 device", 64 * KIB, b"\x01\x16\x19\x70"),
    Mark("a VMFS volume", MIB, b"\x0d\xd0\x01\xc0"),
    Mark("an NVMe drive of SPDK", 0, b"SPDKBLOB"),
    Mark("a partition table", 510, b"\x55\xaa"),  # last: boot sectors of file systems end alike
)


def find(read: Read, size: int) -> str:
    """What is on a drive of `size` bytes, in a few words; empty when everything looked at is zero. OSError."""
    edge = min(EDGE, size)
    head, tail = read(0, edge), read(size - edge, edge)
    for mark in MARKS:
        part = head if mark.offset >= 0 else tail
        at = mark.offset if mark.offset >= 0 else len(tail) + mark.offset
        if at >= 0 and part[at : at + len(mark.magic)] == mark.magic:
            return mark.name
    for start, part in ((0, head), (size - edge, tail), *((at, read(at, SAMPLE)) for at in samples(size))):
        if part.count(0) != len(part):
            first = next(i for i, byte in enumerate(part) if byte)
            return f"something at byte {start + first}"
    return ""


def samples(size: int) -> list[int]:
    """Where between the ends of a drive one looks."""
    inner = size - 2 * EDGE
    if inner < SAMPLE:
        return []
    step = max(SAMPLE, inner // SAMPLES // SAMPLE * SAMPLE)
    return list(range(EDGE, size - EDGE - SAMPLE + 1, step))
