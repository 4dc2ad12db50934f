"""The segments as this process sees them: their geometry, their open files, and which of them serve."""

import contextlib
import errno
import fcntl
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import Batch
from tutti_sglang.errors import EngineError
from tutti_sglang.geometry import Geometry
from tutti_sglang.store.allocation import ACTIVE, SegmentRow
from tutti_sglang.store.drives import Drive
from tutti_sglang.store.errands import DATA_SECONDS
from tutti_sglang.store.health import Health
from tutti_sglang.store.index import Index
from tutti_sglang.store.opener import Opening, open_file

DESCRIPTORS_SHARE = 4
"""Segments keep at most this part of the process's descriptors: SGLang needs them too."""

SETTLED = 10.0
"""Seconds after which a segment without its files is lost; until then its maker may still be renaming them."""


def file_name(segment: int) -> str:
    """`000042.seg`."""
    return f"{segment:06d}.seg"


@dataclass(slots=True)
class Segment:
    """One row of the index's table. `files`: the descriptor on each drive, usable when `open`, else still to be closed;
    `users`: who relies on them now, `writers` among them."""

    row: SegmentRow
    geometry: Geometry
    files: dict[int, int] = field(default_factory=dict)
    open: bool = False
    users: int = 0
    writers: int = 0
    gone: bool = False
    opening: Opening | None = None


class Segments:
    """Thread safe. Files are opened at first use; the least recently used are closed when too many are open."""

    def __init__(self, index: Index, drives: Iterable[Drive], engine: Engine, segment_size: int):
        self.drives = {drive.ordinal: drive for drive in drives}
        self.segment_size = segment_size
        self.lost: set[int] = set()
        self.index = index
        self._engine = engine
        self._files_max = max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_SHARE)
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._table: dict[int, Segment] = {}
        self._tensors: dict[int, tuple[int, ...]] = {}
        self._recent: dict[int, None] = {}

    def refresh(self) -> None:
        """Read the index's table again: other processes make and drop segments too. StoreError."""
        with self._refreshing:  # one at a time: a table that was read earlier must not be applied later
            rows = {row.id: row for row in self.index.segments()}
            if {row.namespace for row in rows.values()} - self._tensors.keys():
                self._tensors = {number: each.tensors for number, each in self.index.namespaces().items()}
            with self._lock:
                for number, row in rows.items():
                    if number not in self._table:
                        self._table[number] = Segment(row, self.geometry_of(row))
                    self._table[number].row = row
                gone = [number for number in self._table if number not in rows]
                for number in gone:
                    self._table[number].gone = True
        for number in gone:
            if self._close(number):
                self._table.pop(number, None)
                self.lost.discard(number)

    def geometry_of(self, row: SegmentRow) -> Geometry:
        """The map of a segment of the table."""
        tensors = self._tensors[row.namespace]
        return Geometry(tensors, row.group, row.cycle, self.segment_size, row.stripe)

    def rows(self) -> list[SegmentRow]:
        """The table as of the last refresh."""
        with self._lock:
            return [each.row for each in self._table.values() if not each.gone]

    def used(self) -> dict[int, int]:
        """Drive ordinal → bytes of segments on it, as of the last refresh."""
        total: dict[int, int] = {}
        with self._lock:
            for each in self._table.values():
                for drive in set(each.row.cycle):
                    total[drive] = total.get(drive, 0) + each.geometry.file_size(drive)
        return total

    def sizes(self) -> dict[int, int]:
        """Segment → bytes on all drives, as of the last refresh."""
        with self._lock:
            return {
                number: sum(each.geometry.file_size(drive) for drive in set(each.row.cycle))
                for number, each in self._table.items()
                if not each.gone
            }

    def find(self, number: int) -> Segment | None:
        """The segment, asking the index again when it is new here; None when there is none."""
        if number not in self._table:
            self.refresh()
        found = self._table.get(number)
        return None if found is None or found.gone else found

    def readable(self, number: int) -> bool:
        """Whether all of its drives serve reads, as far as is known without touching them."""
        return self._all_serve(number, lambda drive: drive.reads)

    def writable(self, number: int) -> bool:
        """Whether all of its drives serve writes, and what is written there will be seen."""
        found = self.find(number)
        return found is not None and found.row.state == ACTIVE and self._all_serve(number, lambda drive: drive.writes)

    def _all_serve(self, number: int, way: Callable[[Drive], Health]) -> bool:
        found = self.find(number)
        if found is None or number in self.lost:
            return False
        return all(drive in self.drives and way(self.drives[drive]).in_service for drive in found.row.cycle)

    def being_written(self, number: int) -> bool:
        """Whether this process is writing to the segment: dropping it then would lose what is written."""
        found = self._table.get(number)
        return found is not None and found.writers > 0

    def unwritable(self, namespace: int) -> list[int]:
        """The segments of a namespace that are not `writable`."""
        return [row.id for row in self.rows() if row.namespace == namespace and not self.writable(row.id)]

    @contextlib.contextmanager
    def use(
        self, numbers: Iterable[int], writing: bool = False, until: float = math.inf
    ) -> Iterator[dict[int, Geometry]]:
        """The geometry of those segments that could be opened, by `until` of time.monotonic() at the latest; their
        files stay open until the end."""
        found = [segment for segment in map(self.find, numbers) if segment is not None]
        self._open_all(found, until)
        with self._lock:
            held = [segment for segment in found if segment.open and not segment.gone]
            for segment in held:
                segment.users += 1
                segment.writers += writing
                self._recent.pop(segment.row.id, None)
                self._recent[segment.row.id] = None
            self._trim(self._files_max)
        try:
            yield {segment.row.id: segment.geometry for segment in held}
        finally:
            with self._lock:
                for segment in held:
                    segment.users -= 1
                    segment.writers -= writing

    def complete(self, number: int) -> bool:
        """False when a drive of the segment is there and its file is not, or is too short."""
        found = self.find(number)
        assert found is not None
        for ordinal in set(found.row.cycle) & self.drives.keys():
            try:
                drive = self.drives[ordinal]
                status = drive.ask(partial(os.stat, file_name(number), dir_fd=drive.segments, follow_symlinks=False))
            except FileNotFoundError:
                return False
            except OSError:
                continue  # the drive has a problem, not the segment
            if status.st_size < found.geometry.file_size(ordinal):
                return False
        return True

    def beyond_end(self, drive: int, number: int, end: int) -> bool:
        """Whether byte `end` of the segment's file on `drive` lies beyond it: it was cut off, and the drive is
        innocent."""
        with self._lock:
            found = self._table.get(number)
            fd = found.files.get(drive, -1) if found else -1
            return fd >= 0 and os.fstat(fd).st_size < end

    def sync(self, numbers: Iterable[int]) -> None:
        """Bring the segments, which are in use, to the disk. OSError."""
        for number in numbers:
            for ordinal, fd in list(self._table[number].files.items()):
                drive = self.drives[ordinal]
                drive.ask(partial(drive.sync, fd), DATA_SECONDS)

    def leave_direct_io(self, failed: Batch) -> None:
        """A file system may take O_DIRECT at first and refuse it later: then it is used through the page cache from now
        on. The I/O that met this is to be tried again."""
        for ordinal in np.unique(failed["drive"][failed["result"] == -errno.EINVAL]).tolist() if len(failed) else ():
            drive = self.drives[ordinal]
            with self._lock:
                if drive.direct:
                    drive.direct, drive.why_buffered = False, "I/O with O_DIRECT was refused later on"
                for each in self._table.values():  # each time: one may have been opened while this was found out
                    if fd := each.files.get(ordinal):
                        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def close(self) -> None:
        """Close all files; the engine is closed and idle."""
        with self._lock:
            for each in self._table.values():
                for ordinal, fd in each.files.items():
                    self.drives[ordinal].close_file(fd)
                each.files.clear()
                each.gone, each.open = True, False

    def _open_all(self, wanted: list[Segment], until: float) -> None:
        """Open what is not open, as far as the drives let us within OPEN_SECONDS. No lock is held meanwhile."""
        with self._lock:
            closed = [segment for segment in wanted if not (segment.open or segment.gone or segment.opening)]
            closed = [each for each in closed if set(each.row.cycle) <= self.drives.keys() and self._shut(each)]
            if closed:
                opening = Opening(partial(self._open_files, closed))
                for segment in closed:
                    segment.opening = opening
            openings = {segment.opening for segment in wanted if segment.opening}
        for each in openings:
            each.wait(until)

    def _open_files(self, segments: list[Segment]) -> None:
        for segment in segments:
            files: dict[int, int] = {}
            failure: OSError | None = None
            try:
                for ordinal in set(segment.row.cycle):
                    files[ordinal] = self._open_file(ordinal, segment.row.id)
            except OSError as error:
                failure = error
            with self._lock:
                segment.opening = None
                if failure is None and not segment.gone:
                    self._adopt(segment, files)
                elif failure and failure.errno == errno.ENOENT and time.time() - segment.row.created > SETTLED:
                    self.lost.add(segment.row.id)
                for fd in files.values():
                    os.close(fd)

    def _open_file(self, ordinal: int, number: int) -> int:
        try:
            return open_file(self.drives[ordinal], file_name(number))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._lock:
                self._trim(0)
            return open_file(self.drives[ordinal], file_name(number))

    def _adopt(self, segment: Segment, files: dict[int, int]) -> None:
        """Hand `files` to the engine; what is left in them it did not take, since it was closed meanwhile."""
        try:
            for ordinal in list(files):
                self._engine.attach(ordinal, segment.row.id, files[ordinal])
                segment.files[ordinal] = files.pop(ordinal)
            segment.open = True
        except EngineError:
            self._shut(segment)

    def _trim(self, most: int) -> None:
        """Close the files of least recently used segments until about `most` are open."""
        surplus = sum(len(self._table[number].files) for number in self._recent) - most
        for number in list(self._recent) if surplus > 0 else ():
            segment = self._table[number]
            if not segment.users:
                count = len(segment.files)
                if self._shut(segment):
                    del self._recent[number]
                surplus -= count
            if surplus <= 0:
                return

    def _close(self, number: int) -> bool:
        """False when it is in use, or a drive still owes an answer."""
        with self._lock:
            segment = self._table.get(number)
            if segment is None:
                return True
            if segment.users:
                return False
            closed = self._shut(segment)
            if closed:
                self._recent.pop(number, None)
            return closed

    def _shut(self, segment: Segment) -> bool:
        segment.open = False
        for ordinal, fd in list(segment.files.items()):
            if self._engine.detach(ordinal, segment.row.id, 0):
                self.drives[ordinal].close_file(fd)
                del segment.files[ordinal]
        return not segment.files
