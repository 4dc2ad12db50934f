"""From the drives into the caller's rows: read into staging in pieces, copy and checksum in one pass."""

import errno
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.checksum import Sums
from tutti_sglang.engine.batch import IoClass, Operation, Ticket
from tutti_sglang.engine.moving import Got, Moved, Read, State, read
from tutti_sglang.engine.staging import Extent
from tutti_sglang.geometry import Geometry
from tutti_sglang.memory import Addresses
from tutti_sglang.store.outcome import CORRUPT, LATE, Codes, codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.plan import objects_of
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
    """What to read: (n,) slots; (n, t) addresses to copy to; the maps of all segments.

    `tensors`: (t,) ascending, those to read, None: all; `roots`: (n,) of the row of their checksums, to compare with.
    """

    space: Space
    slots: Slots
    roots: Sums
    rows: Addresses
    geometries: dict[int, Geometry]
    klass: IoClass
    deadline: float
    tensors: _Which | None = None

    def some(self, which: _Which) -> "Request":
        """Those objects only."""
        return self._replace(slots=self.slots[which], roots=self.roots[which], rows=self.rows[which])

    @property
    def size(self) -> int:
        """Bytes of staging for one object."""
        return self.space.object_size if self.tensors is None else int(self.space.strides[self.tensors].sum())

    @property
    def sizes(self) -> _Which:
        """(t,) bytes of each tensor."""
        return self.space.sizes if self.tensors is None else self.space.sizes[self.tensors]


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
        if not len(request.slots):
            return np.zeros(0, dtype=np.int32)
        step = self._step(len(request.slots), request.size)
        lanes = min(LANES, -(-len(request.slots) // step))
        start = time.monotonic()
        extent = self._extent(lanes, step * request.size, request.deadline)
        self._observe("staging", start)
        if extent is None:
            return np.full(len(request.slots), LATE, dtype=np.int32)
        return self._through(extent, step, request)

    def _step(self, objects: int, size: int) -> int:
        """Objects per piece."""
        least, most = PIECE
        return max(1, min(max(objects * size // LANES, least), most, self._staging.size // (2 * LANES)) // size)

    def _extent(self, lanes: int, nbytes: int, deadline: float) -> Extent | None:
        """Staging for `lanes` pieces of `nbytes`, or for as many as there is room for; one is waited for."""
        while lanes > 1:
            if extent := self._staging.acquire(lanes * nbytes):
                return extent
            lanes //= 2
        return self._staging.wait(nbytes, deadline)

    def _through(self, extent: Extent, step: int, request: Request) -> Codes:
        """Read all objects through `extent`, `step` at a time, and give it back."""
        piece = step * request.size
        lanes = list(range(extent.address, extent.address + extent.size - piece + 1, piece))
        objects = objects_of(request.geometries, request.slots, request.tensors)
        still_open: dict[int, Ticket] = {}
        try:
            with self._parts.window.reading(objects.cycle, request.klass):
                start = time.monotonic()
                got = read(
                    self._engine,
                    Read(
                        objects=objects,
                        rows=request.rows,
                        sizes=request.sizes,
                        roots=request.roots if self._verify else None,
                        lanes=lanes,
                        step=step,
                        klass=request.klass,
                        deadline=request.deadline,
                        hold=self._staging,
                    ),
                )
                self._observe("drive", start)
            still_open = got.open
        finally:
            self._give_back(extent, piece, still_open)
        return self._judged(request, got)

    def _observe(self, phase: str, start: float) -> None:
        self._parts.metrics.observe("tutti_wait_seconds", time.monotonic() - start, phase=phase)

    def _judged(self, request: Request, got: Got) -> Codes:
        """(n,) GOOD or an errno per object; what went wrong is booked."""
        moved = self._excuse(got.moved)
        self._parts.ledger.book(moved, Operation.READ)
        self._parts.segments.leave_direct_io(moved.failed)
        found = codes(moved, len(request.slots))
        found[got.states == State.NEVER] = LATE
        found[got.states == State.ALTERED] = CORRUPT
        return found

    def _excuse(self, moved: Moved) -> Moved:
        """-EIO where a file was cut off becomes -ENODATA: the drive is innocent, and asking again is of no use."""
        size = self._parts.segments.segment_size
        for at in np.flatnonzero(moved.failed["result"] == -errno.EIO).tolist():
            ioctx = moved.failed[at]
            segment, start = divmod(int(ioctx["offset"]), size)
            if self._parts.segments.beyond_end(int(ioctx["drive"]), segment, start + int(ioctx["length"])):
                moved.failed["result"][at] = -errno.ENODATA
        return moved

    def _give_back(self, extent: Extent, piece: int, still_open: dict[int, Ticket]) -> None:
        """What the drives still owe stays where they may write: it returns when the answer comes."""
        for lane, part in enumerate(self._staging.split(extent, piece) if still_open else [extent]):
            if lane in still_open:
                self._staging.quarantine(part, self._engine, still_open[lane])
            else:
                self._staging.release(part)
