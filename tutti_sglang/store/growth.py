"""Making and removing segments: byte-exact capacity, a cycle in proportion to the room on each drive, real extents."""

import contextlib
import ctypes
import errno
import math
import os
import re
import secrets
from collections.abc import Callable

from tutti_sglang.errors import CapacityError
from tutti_sglang.geometry import Geometry, group_size
from tutti_sglang.store.drives import Drive
from tutti_sglang.store.locking import store_lock
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.probe import PREFIX
from tutti_sglang.store.segments import file_name
from tutti_sglang.store.space import Space
from tutti_sglang.units import format_size

WEIGHT_MAX = 4
"""How often a drive may occur in a cycle: ratios of up to 4:1 are met exactly."""

LOCK_TIMEOUT = 1.0
_DRAFT = ".new-"
_SEGMENT = re.compile(r"\d{6,}\.seg")
_ZEROS = bytes(1 << 20)


def weights(room: dict[int, int], segment_size: int) -> dict[int, int]:
    """Drive → how often it occurs in the next segment's cycle: in proportion to its room, and never more than fits."""
    room = {drive: free for drive, free in room.items() if free > 0}
    while room:
        largest = max(room.values())
        share = {drive: max(1, round(WEIGHT_MAX * free / largest)) for drive, free in room.items()}
        divisor = math.gcd(*share.values())
        share = {drive: weight // divisor for drive, weight in share.items()}
        place = segment_size // max(share.values())
        too_small = [drive for drive, weight in share.items() if weight * place > room[drive]]
        if not too_small:
            return share
        del room[min(too_small, key=lambda drive: room[drive] / share[drive])]
    return {}


def spread(share: dict[int, int]) -> tuple[int, ...]:
    """The cycle in which each drive occurs as often as `share` says, evenly spread: {0: 2, 1: 1} → (0, 1, 0)."""
    places = [((2 * turn + 1) / (2 * weight), drive) for drive, weight in share.items() for turn in range(weight)]
    return tuple(drive for _, drive in sorted(places))


def preallocate(fd: int, size: int) -> None:
    """Give an empty file its `size` bytes, by fallocate or, where there is none, by writing zeros. OSError."""
    try:
        _fallocate(fd, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        for at in range(0, size, len(_ZEROS)):
            piece = min(len(_ZEROS), size - at)
            if os.pwrite(fd, _ZEROS[:piece], at) != piece:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None


class Growth:
    """Adds segments to the store and takes them away. Each step is one holder of the store's lock at a time."""

    def __init__(self, parts: Parts, allocate: Callable[[int, int], None] = preallocate) -> None:
        self._index = parts.index
        self._segments = parts.segments
        self._sums = parts.sums
        self._index_dir = parts.index_dir
        self._stripe = parts.config.stripe
        self._allocate = allocate

    def _next_geometry(self, tensors: tuple[int, ...]) -> Geometry | None:
        """The map that a new segment would get now; None when no drive has room for one."""
        used = self._segments.used()
        room = {
            number: drive.room(used.get(number, 0))
            for number, drive in self._segments.drives.items()
            if drive.writes.in_service and drive.reads.in_service
        }
        share = weights(room, self._segments.segment_size)
        if not share:
            return None
        geometry = Geometry(tensors, group_size(tensors), spread(share), self._segments.segment_size, self._stripe)
        return geometry if geometry.slots else None

    def check_fits(self, space: Space) -> None:
        """CapacityError when a segment on all drives holds not one group of objects."""
        size = self._segments.segment_size
        share = weights({number: drive.limit for number, drive in self._segments.drives.items()}, size)
        geometry = Geometry(space.tensors, group_size(space.tensors), spread(share), size, self._stripe)
        if not geometry.slots:
            raise CapacityError(
                f"A segment of {format_size(size)} per drive holds not one group of {geometry.group} pages of "
                f"{format_size(space.object_size)}",
                "Raise segment_size (it is fixed when a store is made: name an empty directory)",
            )

    def add(self, space: Space) -> bool:
        """One more segment for the namespace; False when there is no room, or the lock is held too long. OSError."""
        with store_lock(self._index_dir, LOCK_TIMEOUT) as held:
            if not held:
                return False
            self._segments.refresh()
            geometry = self._next_geometry(space.tensors)
            if geometry is None:
                return False
            drafts = self._make_files(geometry)
            try:
                number = self._index.add_segment(
                    space.id, geometry.cycle, geometry.group, geometry.slots, geometry.stripe
                )
                for drive, name in drafts.items():
                    directory = self._segments.drives[drive].segments
                    os.rename(name, file_name(number), src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                self._remove(drafts)
                raise
            self._segments.refresh()
            return True

    def drop(self, number: int) -> int:
        """Take a segment away with all that is in it; how many objects went. Readers that have it open are not
        disturbed."""
        with store_lock(self._index_dir, LOCK_TIMEOUT) as held:
            return self._drop(number) if held else 0

    def reconcile(self) -> int:
        """Remove what no process uses: drafts, files without a row, rows without their files. How many objects were
        lost.
        The caller holds the store's lock. StoreError."""
        self._segments.refresh()
        rows = {row.id: row for row in self._segments.rows()}
        for ordinal, drive in self._segments.drives.items():
            mine = {file_name(number) for number, row in rows.items() if ordinal in row.cycle}
            for name in set(os.listdir(drive.segments)) - mine:
                if name.startswith((_DRAFT, PREFIX)) or _SEGMENT.fullmatch(name):
                    self._remove({ordinal: name})
        for number in self._sums.segments() - rows.keys():
            self._sums.drop(number)
        return sum(self._drop(number) for number in rows if not self._segments.complete(number))

    def _drop(self, number: int) -> int:
        """The row first: a crash then leaves files without a row, which nobody reads."""
        self._segments.refresh()
        found = self._segments.find(number)
        if found is None:
            return 0
        gone = self._index.drop_segment(number)
        self._remove({drive: file_name(number) for drive in set(found.row.cycle) & self._segments.drives.keys()})
        self._sums.drop(number)
        self._segments.refresh()
        return gone

    def _make_files(self, geometry: Geometry) -> dict[int, str]:
        """Preallocated files under names that nobody uses, so that a crash leaves nothing that looks like a segment."""
        drafts: dict[int, str] = {}
        try:
            for number in set(geometry.cycle):
                drive = self._segments.drives[number]
                drafts[number] = _DRAFT + secrets.token_hex(8)
                self._make_file(drive, drafts[number], geometry.file_size(number))
        except BaseException:
            self._remove(drafts)
            raise
        return drafts

    def _make_file(self, drive: Drive, name: str, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=drive.segments)
        try:
            self._allocate(fd, size)
            os.fsync(fd)  # size and extents, so that what is written later with O_DIRECT is there after a power cut
        finally:
            os.close(fd)

    def _remove(self, names: dict[int, str]) -> None:
        for drive, name in names.items():
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._segments.drives[drive].segments)


def _fallocate(fd: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
