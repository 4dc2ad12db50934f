"""From the drives into the caller's rows: read into staging in pieces, copy and checksum in one pass."""

import errno
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.checksum import Sums
from tutti_sglang.engine.batch import IoClass, Operation
from tutti_sglang.engine.moving import Got, Moved, Read, State, abandon, read
from tutti_sglang.geometry import Geometry
from tutti_sglang.memory import PAGE, Addresses
from tutti_sglang.store.ahead import Ahead, Lanes, ReadAhead
from tutti_sglang.store.outcome import CORRUPT, LATE, Codes, codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.plan import objects_of
from tutti_sglang.store.slots import Slots
from tutti_sglang.store.space import Space

LANES = 8
"""Pieces under way at once: what one holds is copied out while the drives fill the others."""

PIECE = 2 << 20, 8 << 20
"""Bytes of a piece, at least and at most: small enough that a short read overlaps too, large enough for long I/O."""

STRAIGHT_BYTES = 16 << 20
"""Without checksums the drives write so much, or more, where it is wanted. Small batches come faster ahead of time."""

AHEAD_SECONDS = 0.05
"""For so long after a call no write starts where its successor is being read."""

TRANSIENT = [errno.EIO, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EINVAL]
"""Worth one more attempt within the same call."""

_Which = npt.NDArray[np.int64]


class Request(NamedTuple):
    """What to read: (n,) slots; (n, t) addresses to copy to; the maps of all segments.

    `tensors`: (t,) ascending, those to read, None: all; `roots`: (n,) of the row of their checksums, to compare with;
    `state`: of the index, where that alone says that the slots are still theirs.
    """

    space: Space
    slots: Slots
    roots: Sums
    rows: Addresses
    geometries: dict[int, Geometry]
    klass: IoClass
    deadline: float
    tensors: _Which | None = None
    state: bytes | None = None

    def some(self, which: _Which) -> "Request":
        """Those objects only."""
        return self._replace(slots=self.slots[which], roots=self.roots[which], rows=self.rows[which])

    @property
    def name(self) -> tuple[int, bytes, bytes]:
        """What it is that is read, whoever wants it where; requests for some tensors have none in common. Bytes that
        nothing is compared with are of their moment: the slots may have been another's in between."""
        which = b"" if self.tensors is None else self.tensors.tobytes()
        return self.space.id, self.slots.tobytes() + which, self.roots.tobytes() + (self.state or b"")

    @property
    def strides(self) -> _Which:
        """(t,) bytes that each tensor occupies in staging and on a drive."""
        return self.space.strides if self.tensors is None else self.space.strides[self.tensors]

    @property
    def size(self) -> int:
        """Bytes of staging for one object."""
        return self.space.object_size if self.tensors is None else int(self.strides.sum())

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
        self.ahead = ReadAhead(parts)

    def read(self, request: Request, then: Request | None = None) -> Codes:
        """(n,) GOOD where the object is in its rows, else an errno. No row is written after this returned. `then`: what
        is likely to be asked for next; its rows do not matter."""
        found = self._attempt(request, then)
        again = np.flatnonzero(np.isin(found, TRANSIENT))
        if len(again) and time.monotonic() < request.deadline:
            found[again] = self._attempt(request.some(again), None)
        return found

    def _attempt(self, request: Request, then: Request | None) -> Codes:
        if not len(request.slots):
            return np.zeros(0, dtype=np.int32)
        ahead = self.ahead.claim(request.name)
        if not ahead and self._straight(request):
            return self._into_rows(request)
        start = time.monotonic()
        lanes = ahead.lanes if ahead else self._lanes(request)
        self._observe("staging", start)
        if lanes is None:
            return np.full(len(request.slots), LATE, dtype=np.int32)
        return self._through(lanes, request, ahead, then)

    def _lanes(self, request: Request) -> Lanes | None:
        """Staging for the pieces of a request, or for as many as there is room for; one is waited for."""
        lanes, nbytes, step = self._shape(request)
        while lanes > 1:
            if extent := self._staging.acquire(lanes * nbytes):
                return Lanes(extent, nbytes, step)
            lanes //= 2
        last = self._staging.wait(nbytes, request.deadline)
        return Lanes(last, nbytes, step) if last else None

    def _shape(self, request: Request) -> tuple[int, int, int]:
        """Lanes, bytes of a piece, and objects in it."""
        objects, (least, most) = len(request.slots), PIECE
        size = max(objects * request.size // LANES, least)
        step = max(1, min(size, most, self._staging.size // (2 * LANES)) // request.size)
        return min(LANES, -(-objects // step)), step * request.size, step

    def _through(self, lanes: Lanes, request: Request, ahead: Ahead | None, then: Request | None) -> Codes:
        """Read all objects through `lanes`, and give them back; begin with what is next."""
        now = ahead.begun.request if ahead else self._pack(request, lanes.addresses, lanes.step)
        now = now._replace(rows=request.rows, roots=self._roots(request), deadline=request.deadline)
        room = self.ahead.lanes(*self._shape(then)) if then and self.ahead.possible else None
        begun = ahead and ahead.begun
        got: Got | None = None
        try:
            following = self._pack(then, room.addresses, room.step) if then and room else None
            with self._parts.window.reading(now.objects.cycle, request.klass):
                start = time.monotonic()
                got = read(self._engine, now, begun, following)
                self._observe("drive", start)
        finally:  # whatever was raised, and where: what drives may still write to is nobody else's
            still_open = got.open if got else abandon(self._engine, begun) if begun else {}
            self.ahead.give_back(lanes, still_open)
            if then and room and got and got.begun:
                self.ahead.keep(Ahead(then.name, got.begun, room, time.monotonic()))
                self._parts.window.expect_reads(now.objects.cycle, AHEAD_SECONDS)
            elif room:
                self.ahead.give_back(room, {})
        return self._judged(request, got)

    def _straight(self, request: Request) -> bool:
        """Whether the drives can write a read that nobody verifies where it is wanted."""
        if self._verify or not self.ahead.possible or len(request.slots) * request.size < STRAIGHT_BYTES:
            return False
        return bool((request.strides == request.sizes).all()) and not (request.rows & np.uint64(PAGE - 1)).any()

    def _into_rows(self, request: Request) -> Codes:
        """No byte is copied. What the drives have begun is waited for, however long it takes: it is SGLang's memory."""
        step = max(1, PIECE[1] // request.size)
        whole = self._pack(request, [0] * -(-len(request.slots) // step), step)
        whole = whole._replace(rows=request.rows, straight=True, hold=None)
        with self._parts.window.reading(whole.objects.cycle, request.klass):
            start = time.monotonic()
            got = read(self._engine, whole)
            self._observe("drive", start)
        return self._judged(request, got)

    def _pack(self, request: Request, lanes: list[int], step: int) -> Read:
        """As the engine wants it, without rows."""
        return Read(
            objects=objects_of(request.geometries, request.slots, request.tensors),
            rows=None,
            sizes=request.sizes,
            roots=None,
            lanes=lanes,
            step=step,
            klass=request.klass,
            deadline=request.deadline,
            hold=self._staging,
        )

    def _roots(self, request: Request) -> Sums | None:
        return request.roots if self._verify else None

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
