"""Adding segments to the store and taking them away, under the store's lock: byte-exact capacity, nothing left by a
crash."""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from functools import partial

from tutti_sglang.errors import CapacityError
from tutti_sglang.geometry import Geometry, group_size
from tutti_sglang.store.cycle import WEIGHT_MAX, spread, weights
from tutti_sglang.store.drives import Drive
from tutti_sglang.store.errands import DATA_SECONDS
from tutti_sglang.store.locking import store_lock
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.preallocate import preallocate
from tutti_sglang.store.probe import PREFIX
from tutti_sglang.store.segments import file_name
from tutti_sglang.store.space import Space
from tutti_sglang.units import format_size

LOCK_TIMEOUT = 1.0
_DRAFT = ".new-"
_SEGMENT = re.compile(r"\d{6,}\.seg")


class Growth:
    """Thread safe. Who cannot have the lock in time does nothing; `locked_out`: that is why the last `add` did not."""

    def __init__(self, parts: Parts, allocate: Callable[[int, int], None] = preallocate) -> None:
        self._parts = parts
        self._segments = parts.segments
        self._allocate = allocate
        self.locked_out = False

    def check_fits(self, space: Space) -> None:
        """CapacityError when a segment on all drives holds not one group of objects."""
        geometry = self._geometry(space, {number: drive.limit for number, drive in self._parts.drives.items()})
        if geometry is None:
            raise CapacityError(
                f"A segment of {format_size(self._segments.segment_size)} per drive holds not one group of pages of "
                f"{format_size(space.object_size)}",
                "Raise segment_size (it is fixed when a store is made: name an empty directory)",
            )

    def add(self, space: Space) -> bool:
        """One more segment for the namespace; False when there is no room for one, or it could not be made.
        StoreError."""
        with self.locked() as held:
            self.locked_out = not held
            if not held:
                return False
            self._segments.refresh()
            geometry = self._geometry(space, self._room())
            drafts = self._make_files(geometry) if geometry else None
            if not geometry or not drafts:
                return False
            try:
                number = self._parts.index.add_segment(
                    space.id, geometry.cycle, geometry.group, geometry.slots, geometry.stripe
                )
                complete = self._name(drafts, number)
            finally:
                self._remove(drafts)
            self._segments.refresh()
            return complete

    def full(self, space: Space) -> bool:
        """Whether there is no room for one more segment of the namespace, as of the last refresh."""
        return self._geometry(space, self._room()) is None

    def drop(self, number: int) -> int | None:
        """Take a segment away with all that is in it; how many objects went, None when it could not be done now. Who is
        reading it is not disturbed. StoreError."""
        with self.locked() as held:
            return self._drop(number) if held else None

    def shrink(self) -> int:
        """Drop the oldest segments until no drive holds more than max_size; how many objects went. The caller holds the
        store's lock. StoreError."""
        gone = 0
        while over := {number for number, used in self._segments.used().items() if self._over(number, used)}:
            gone += self._drop(min(row.id for row in self._segments.rows() if over & set(row.cycle)))
        return gone

    def yield_space(self) -> int | None:
        """Drop the oldest segment of a drive that has less than min_free_space left; how many objects went, None where
        there is no such drive. StoreError."""
        for ordinal, drive in self._parts.drives.items():
            rows = [row.id for row in self._segments.rows() if ordinal in row.cycle]
            with contextlib.suppress(OSError):
                if rows and drive.serves and drive.free() < drive.min_free:
                    return self.drop(min(rows))
        return None

    def orphans(self) -> list[tuple[int, str]]:
        """Drive ordinals and names of files that belong to no segment: drafts, and what a crash between two steps left.
        The caller holds the store's lock."""
        rows = {row.id: row for row in self._segments.rows()}
        found = []
        for ordinal, drive in self._parts.drives.items():
            mine = {file_name(number) for number, row in rows.items() if ordinal in row.cycle}
            for name in set(self._names(drive)) - mine:
                if name.startswith((_DRAFT, PREFIX)) or _SEGMENT.fullmatch(name):
                    found.append((ordinal, name))
        return found

    def incomplete(self) -> list[int]:
        """Segments that lack a file on a drive that is there, or have one that is too short."""
        return [row.id for row in self._segments.rows() if not self._segments.complete(row.id)]

    def reconcile(self) -> int:
        """Remove orphans and incomplete segments; how many objects were lost with these. The caller holds the store's
        lock. StoreError."""
        self._segments.refresh()
        for ordinal, name in self.orphans():
            self._remove({ordinal: name})
        for number in self._parts.sums.segments() - {row.id for row in self._segments.rows()}:
            self._parts.sums.drop(number)
        return sum(self._drop(number) for number in self.incomplete())

    @contextlib.contextmanager
    def locked(self, timeout: float = LOCK_TIMEOUT) -> Iterator[bool]:
        """Hold the store's lock; False when it could not be had."""
        with store_lock(self._parts.index_dir, timeout) as held:
            yield held

    def _room(self) -> dict[int, int]:
        used = self._segments.used()
        room = {}
        for number, drive in self._parts.drives.items():
            with contextlib.suppress(OSError):
                if drive.serves:
                    room[number] = drive.room(used.get(number, 0))
        return room

    def _names(self, drive: Drive) -> list[str]:
        try:
            return drive.ask(partial(os.listdir, drive.segments))
        except OSError as error:
            self._parts.ledger.refused(drive.ordinal, "list", error)
            return []

    def _geometry(self, space: Space, room: dict[int, int]) -> Geometry | None:
        """The map of a new segment where drives have so much `room`; None when none fits. A long cycle has small
        places, which a large group may not fit into."""
        size = self._segments.segment_size
        for most in range(WEIGHT_MAX, 0, -1):
            if share := weights(room, size, most):
                cycle = spread(share)
                geometry = Geometry(space.tensors, group_size(space.tensors), cycle, size, self._parts.config.stripe)
                if geometry.slots:
                    return geometry
        return None

    def _over(self, ordinal: int, used: int) -> bool:
        drive = self._parts.drives.get(ordinal)
        return drive is not None and self._parts.config.max_size > 0 and used > drive.limit

    def _drop(self, number: int) -> int:
        """The row first: a crash then leaves files without a row, which nobody reads."""
        self._segments.refresh()
        found = self._segments.find(number)
        if found is None:
            return 0
        gone = self._parts.index.drop_segment(number)
        self._remove({drive: file_name(number) for drive in set(found.row.cycle) & self._parts.drives.keys()})
        self._parts.sums.drop(number)
        self._segments.refresh()
        return gone

    def _make_files(self, geometry: Geometry) -> dict[int, str] | None:
        """Preallocated files under names that nobody uses, so that a crash leaves nothing that looks like a segment.
        None when a drive refuses: then it is full, or out of service."""
        drafts: dict[int, str] = {}
        for number in sorted(set(geometry.cycle)):
            drafts[number] = _DRAFT + secrets.token_hex(8)
            drive, size = self._parts.drives[number], geometry.file_size(number)
            try:
                drive.ask(partial(self._make_file, drive, drafts[number], size), DATA_SECONDS)
            except OSError as error:
                self._remove(drafts)
                self._parts.ledger.refused(number, "create", error)
                return None
        return drafts

    def _make_file(self, drive: Drive, name: str, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=drive.segments)
        try:
            if not drive.allocate(fd, size):
                self._allocate(fd, size)
            os.fsync(fd)  # size and extents: data that is synced later must not need them any more after a power cut
        finally:
            os.close(fd)

    def _name(self, drafts: dict[int, str], number: int) -> bool:
        """Give the files of a recorded segment their names. False when a drive refuses: then the segment goes at once,
        before many of its slots are leased in vain."""
        for ordinal, name in drafts.items():
            drive = self._parts.drives[ordinal]
            place = drive.segments
            try:
                drive.ask(partial(os.rename, name, file_name(number), src_dir_fd=place, dst_dir_fd=place))
            except OSError as error:
                self._parts.ledger.refused(ordinal, "create", error)
                self._drop(number)
                return False
        return True

    def _remove(self, names: dict[int, str]) -> None:
        for drive, name in names.items():
            self._parts.drives[drive].remove(name)
