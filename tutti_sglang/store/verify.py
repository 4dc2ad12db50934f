"""Verification: every object is read and compared, files and index are compared, and what is wrong can be removed."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.batch import IoClass
from tutti_sglang.engine.plan import object_addresses, tensor_addresses
from tutti_sglang.errors import StoreError
from tutti_sglang.memory import Addresses, Region
from tutti_sglang.store.audit import Audit, Batch, audit, objects
from tutti_sglang.store.database import FAILURES
from tutti_sglang.store.growth import Growth
from tutti_sglang.store.index import Records
from tutti_sglang.store.keys import marks, some
from tutti_sglang.store.outcome import GOOD, PERMANENT, UNOPENED, Codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.reader import Reader, Request
from tutti_sglang.store.sight import Flags
from tutti_sglang.store.slots import SEGMENT_SHIFT, SLOTS_MAX, Slots, numbers_of, segments_in, segments_of
from tutti_sglang.store.space import Space

REGION = 16 << 20
"""Bytes of objects that are read at once."""
SECONDS, LOCK_SECONDS = 60.0, 5.0
"""For reading them; for the store's lock."""
PROBLEMS_MAX = 100


@dataclass
class VerifyReport:
    """What was found, in numbers; `repaired`: how much of it was put right; `problems`: the first of them in words.

    `objects`: looked at; `damaged`: not the bytes that were put; `unreadable`: a drive failed or is missing; `sums`:
    rows of tensor checksums that do not fit their object; `lost`, `double`: slots in no state or in two; `stray`:
    objects outside their segments; `files`: segments without all of their files, and files without a segment.
    """

    objects: int = 0
    damaged: int = 0
    unreadable: int = 0
    sums: int = 0
    lost: int = 0
    double: int = 0
    stray: int = 0
    files: int = 0
    repaired: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing was found."""
        return not (
            self.damaged or self.unreadable or self.sums or self.lost or self.double or self.stray or self.files
        )


class Verifier:
    """One verification; other threads and processes may use the store meanwhile."""

    def __init__(self, parts: Parts, growth: Growth, repair: bool, progress: Callable[[int], None]) -> None:
        """`progress`: is told the payload bytes of each piece that was looked at."""
        self._progress = progress
        self._parts = parts
        self._growth = growth
        self._repair = repair
        self._reader = Reader(parts, verify=True)
        self._report = VerifyReport()

    def run(self, namespace: int | None) -> VerifyReport:
        """All of the store, or the objects of one namespace. StoreError."""
        self._parts.segments.refresh()
        path = self._parts.index.path
        spaces = {number: Space(number, row.tensors) for number, row in self._parts.index.namespaces().items()}
        try:
            for found in objects(path, spaces, namespace):
                for batch in found.batches:
                    self._report.objects += len(batch.records)
                    self._check(spaces[batch.namespace], batch)
                self._judge_rows(found.broken)
            if namespace is None:
                self._account(audit(path))
        except FAILURES as error:
            raise StoreError(f"The index {path} cannot be read ({error})", "Stop all servers and remove it") from error
        return self._report

    def _check(self, space: Space, batch: Batch) -> None:
        step = max(1, REGION // space.object_size)
        region = Region(step * space.object_size)
        for start in range(0, len(batch.records), step):
            piece = np.arange(start, min(start + step, len(batch.records)))
            rows = tensor_addresses(object_addresses(region.address, len(piece), space.object_size), space.strides)
            keys, records = some(batch.keys, piece), batch.records[piece]
            with self._parts.owners.reading(self._parts.index.last_epoch, self._parts.config.grace_seconds):
                now = np.flatnonzero(self._parts.index.lookup(space.id, keys).records == records)
                keys, records, rows = some(keys, now), records[now], rows[now]
                roots = records["root"] ^ marks(space.id, keys)
                found = self._read(space, records, roots, rows)
                still = self._parts.index.lookup(space.id, keys).records == records
                fitting = self._sums_fit(space, records, roots)
            self._judge(space, keys, records, np.where(still, found, GOOD).astype(np.int32))
            self._judge_sums(space, records, rows, np.flatnonzero(still & (found == GOOD) & ~fitting))
            self._progress(len(piece) * space.payload)
        region.close()

    def _read(self, space: Space, records: Records, roots: Sums, rows: Addresses) -> Codes:
        found = np.full(len(records), UNOPENED, dtype=np.int32)
        slots = records["slot"].astype(np.int64)
        with self._parts.segments.use(segments_in(slots)) as maps:
            opened = np.flatnonzero(np.isin(segments_of(slots), list(maps)))
            wanted = (slots[opened], roots[opened], rows[opened])
            deadline = time.monotonic() + SECONDS
            found[opened] = self._reader.read(Request(space, *wanted, maps, IoClass.PRELOAD, deadline))
        return found

    def _sums_fit(self, space: Space, records: Records, roots: Sums) -> Flags:
        """(n,) whether the stored row of tensor checksums has the root of the record."""
        fits = np.zeros(len(records), dtype=np.bool_)
        slots = records["slot"].astype(np.int64)
        for segment in segments_in(slots):
            mine = segments_of(slots) == segment
            table = self._parts.sums.read(segment, numbers_of(slots[mine]), len(space.tensors))
            fits[mine] = checksum.roots(table) == roots[mine]
        return fits

    def _judge(self, space: Space, keys: bytes, records: Records, found: Codes) -> None:
        """Count what could not be read; remove it where it is spoiled for good."""
        bad = np.flatnonzero(np.isin(found, list(PERMANENT)))
        self._report.damaged += len(bad)
        self._report.unreadable += int((found != GOOD).sum()) - len(bad)
        for each in np.flatnonzero(found != GOOD).tolist():
            slot = int(records["slot"][each])
            place = f"slot {slot & SLOTS_MAX} of segment {slot >> SEGMENT_SHIFT}"
            self._say(f"object in {place}: {os.strerror(int(found[each]))}")
        if self._repair and len(bad):
            gone = self._parts.index.delete(space.id, some(keys, bad), records["slot"][bad].astype(np.int64))
            self._report.repaired += int(gone.sum())

    def _judge_rows(self, broken: Slots) -> None:
        """Rows of the index that say nothing: what they were about is lost."""
        self._report.damaged += len(broken)
        for slot in broken.tolist():
            self._say(f"the index has nonsense about slot {slot & SLOTS_MAX} of segment {slot >> SEGMENT_SHIFT}")
        if self._repair and len(broken):
            self._report.repaired += self._parts.index.remove(broken)

    def _judge_sums(self, space: Space, records: Records, rows: Addresses, bad: npt.NDArray[np.int64]) -> None:
        """The objects are good, their rows of checksums are not: these can be made again."""
        if not len(bad):
            return
        self._report.sums += len(bad)
        self._say(f"{len(bad)} rows of tensor checksums do not fit their objects")
        if self._repair:
            slots = records["slot"][bad].astype(np.int64)
            table = checksum.sums(rows[bad], space.sizes)
            for segment in segments_in(slots):
                mine = segments_of(slots) == segment
                self._parts.sums.write(segment, numbers_of(slots[mine]), table[mine], sync=False)
            self._report.repaired += len(bad)

    def _account(self, found: Audit) -> None:
        """Slots and files."""
        self._report.lost = sum(found.lost.values())
        self._report.double = sum(found.double.values())
        self._report.stray = found.stray
        for segment in found.lost.keys() | found.double.keys():
            self._say(
                f"segment {segment}: {found.lost.get(segment, 0)} slots lost, {found.double.get(segment, 0)} double"
            )
            if self._repair and self._growth.drop(segment) is not None:
                self._report.repaired += found.lost.get(segment, 0) + found.double.get(segment, 0)
        with self._growth.locked(LOCK_SECONDS) as held:
            if not held:
                self._say("files were not compared: another process holds the store's lock")
                return
            self._parts.segments.refresh()
            orphans, incomplete = self._growth.orphans(), self._growth.incomplete()
            self._report.files = len(orphans) + len(incomplete)
            for drive, name in orphans:
                self._say(f"{self._parts.drives[drive].path}: {name} belongs to no segment")
            for number in incomplete:
                self._say(f"segment {number} lacks a file, or has one that is too short")
            if self._repair:
                self._growth.reconcile()
                self._report.repaired += self._report.files

    def _say(self, problem: str) -> None:
        if len(self._report.problems) < PROBLEMS_MAX:
            self._report.problems.append(problem)
