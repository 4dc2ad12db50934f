"""From the drives into the caller's rows: read into staging in pieces, copy and checksum in one pass."""

import errno
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.batch import IoClass, Operation, Results, Ticket
from tutti_sglang.engine.fetch import Fetch, fetch
from tutti_sglang.engine.staging import Extent
from tutti_sglang.memory import Addresses
from tutti_sglang.store.outcome import CORRUPT, LATE, Codes, codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.plan import Places, Plan, plan, tensor_addresses
from tutti_sglang.store.slots import Slots
from tutti_sglang.store.space import Space

LANES = 8
"""Pieces under way at once: what one holds is copied out while the drives fill the others."""

PIECE = 2 << 20, 8 << 20
"""Bytes of a piece, at least and at most: small enough that a short read overlaps too, large enough for long I/O."""

_TRANSIENT = [errno.EIO, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EINVAL]
"""Worth one more attempt within the same call."""

_Which = npt.NDArray[np.int64]


class Request(NamedTuple):
    """What to read: (n,) slots and (n,) roots to compare with; (n, T) addresses to copy to; the maps of all
    segments."""

    space: Space
    slots: Slots
    roots: Sums
    rows: Addresses
    geometries: Mapping[int, Places]
    klass: IoClass
    deadline: float

    def some(self, which: _Which) -> "Request":
        """Those objects only."""
        return self._replace(slots=self.slots[which], roots=self.roots[which], rows=self.rows[which])


class Reader:
    """Reads objects whose slots are known. Thread safe."""

    def __init__(self, parts: Parts, verify: bool) -> None:
        """`verify`: compare roots."""
        self._parts = parts
        self._verify = verify
        self._engine = parts.engine
        self._staging = parts.staging

    def read(self, request: Request) -> Codes:
        """(n,) GOOD where the object is in its rows, else an errno. No row is written after this returned."""
        found = self._attempt(request)
        again = np.flatnonzero(np.isin(found, _TRANSIENT))
        if len(again) and time.monotonic() < request.deadline:
            found[again] = self._attempt(request.some(again))
        return found

    def _attempt(self, request: Request) -> Codes:
        found = np.full(len(request.slots), LATE, dtype=np.int32)
        order = np.argsort(request.slots)  # neighbours in one piece: the engine makes one I/O of them
        size = request.space.object_size
        step = self._step(len(order), size)
        lanes = min(LANES, -(-len(order) // step))
        if lanes and (extents := self._extents(lanes, step * size, request.deadline)):
            found[order] = self._through(extents, step, request.some(order))
        return found

    def _step(self, objects: int, size: int) -> int:
        """Objects per piece."""
        least, most = PIECE
        return max(1, min(max(objects * size // LANES, least), most, self._staging.size // (2 * LANES)) // size)

    def _extents(self, lanes: int, nbytes: int, deadline: float) -> list[Extent]:
        """Staging for each lane: the first one is waited for, more are taken as far as there is room."""
        extents = [self._staging.wait(nbytes, deadline)]
        while extents[-1] and len(extents) < lanes:
            extents.append(self._staging.acquire(nbytes))
        return [extent for extent in extents if extent]

    def _through(self, extents: list[Extent], step: int, request: Request) -> Codes:
        """Read all objects through `extents`, `step` at a time, and give these back."""
        pieces, within = np.divmod(np.arange(len(request.slots)), step)
        starts = np.array([extent.address for extent in extents], dtype=np.uint64)[pieces % len(extents)]
        base = starts + (within * request.space.object_size).astype(np.uint64)
        planned = plan(request.geometries, request.slots, base, Operation.READ, request.klass, pieces)
        ends = np.arange(int(pieces[-1]) + 2)
        still_open: list[Ticket] = []
        try:
            drives = np.unique(planned.batch["drive"]).tolist()
            with self._parts.window.reading(drives, request.klass):
                fetched = fetch(
                    self._engine,
                    Fetch(
                        batch=planned.batch,
                        owner=planned.owner.astype(np.uint32),
                        contexts=np.searchsorted(pieces[planned.owner], ends).astype(np.uint32),
                        objects=np.searchsorted(pieces, ends).astype(np.uint32),
                        target=request.rows,
                        source=tensor_addresses(base, request.space.strides),
                        sizes=request.space.sizes,
                        lanes=len(extents),
                        klass=request.klass,
                        deadline=request.deadline,
                        hold=self._staging,
                        sums=self._verify,
                    ),
                )
            still_open = fetched.open
        finally:
            self._give_back(extents, still_open)
        results = self._excuse(planned, fetched.results)
        self._parts.ledger.book(planned, results, Operation.READ)
        self._parts.segments.leave_direct_io(planned.batch, results)
        found = codes(planned, results, len(request.slots))
        if self._verify:
            found[fetched.copied & (checksum.roots(fetched.sums) != request.roots)] = CORRUPT
        return found

    def _excuse(self, planned: Plan, results: Results) -> Results:
        """-EIO where a file was cut off becomes -ENODATA: the drive is innocent, and asking again is of no use."""
        size = self._parts.segments.segment_size
        for at in np.flatnonzero(results == -errno.EIO).tolist():
            ioctx = planned.batch[at]
            segment, start = divmod(int(ioctx["offset"]), size)
            if self._parts.segments.beyond_end(int(ioctx["drive"]), segment, start + int(ioctx["length"])):
                results[at] = -errno.ENODATA
        return results

    def _give_back(self, extents: list[Extent], still_open: list[Ticket]) -> None:
        """What the drives still owe stays where they may write: it returns when the answer comes."""
        for extent in extents:
            owed = [ticket for ticket in still_open if _inside(extent, ticket)]
            if owed:
                self._staging.quarantine(extent, self._engine, owed[0])
            else:
                self._staging.release(extent)


def _inside(extent: Extent, ticket: Ticket) -> bool:
    return extent.address <= int(ticket.batch["address"][0]) < extent.address + extent.size
