"""From the drives into the caller's rows: read into staging in pieces, copy and checksum in one pass."""

import errno
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum, memory
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.batch import IN_PROGRESS, IoClass, Operation, Results, Ticket
from tutti_sglang.engine.staging import Extent
from tutti_sglang.geometry import Geometry
from tutti_sglang.memory import Addresses
from tutti_sglang.store.outcome import CORRUPT, LATE, Codes, codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.plan import Plan, object_addresses, plan, tensor_addresses
from tutti_sglang.store.slots import Slots
from tutti_sglang.store.space import Space

PIECE = 16 << 20
"""Bytes that are read as one batch of I/O; they are copied out while the next ones are under way."""
PIECES_IN_FLIGHT = 2

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
    geometries: dict[int, Geometry]
    klass: IoClass
    deadline: float

    def some(self, which: _Which) -> "Request":
        """Those objects only."""
        return self._replace(slots=self.slots[which], roots=self.roots[which], rows=self.rows[which])


@dataclass(frozen=True, slots=True)
class _Piece:
    """One batch of I/O under way: `which` objects of the request, one after the other in `extent`."""

    which: _Which
    extent: Extent
    plan: Plan
    ticket: Ticket


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
        size = request.space.object_size
        step = max(1, min(PIECE, self._staging.size // (4 * PIECES_IN_FLIGHT)) // size)
        order = np.argsort(request.slots)  # neighbours in one piece: the engine makes one I/O of them
        waiting = deque(order[start : start + step] for start in range(0, len(order), step))
        flying: deque[_Piece] = deque()
        try:
            while waiting or flying:
                while waiting and len(flying) < PIECES_IN_FLIGHT:
                    # With something under way, do not wait for room: finishing it makes room.
                    wanted = len(waiting[0]) * size
                    extent = self._staging.acquire(wanted) if flying else self._staging.wait(wanted, request.deadline)
                    if extent is None:
                        break
                    flying.append(self._start(request, waiting.popleft(), extent))
                if not flying:
                    break
                piece = flying.popleft()
                found[piece.which] = self._finish(request, piece)
        finally:
            for piece in flying:
                self._give_back(piece)
        return found

    def _start(self, request: Request, which: _Which, extent: Extent) -> _Piece:
        base = object_addresses(extent.address, len(which), request.space.object_size)
        planned = plan(request.geometries, request.slots[which], base, Operation.READ, request.klass)
        try:
            ticket = self._engine.submit(planned.batch, request.klass, request.deadline, self._staging)
        except BaseException:
            self._staging.release(extent)
            raise
        return _Piece(which, extent, planned, ticket)

    def _finish(self, request: Request, piece: _Piece) -> Codes:
        try:
            results = self._engine.wait(piece.ticket, max(0.0, request.deadline - time.monotonic()))
            if (results == IN_PROGRESS).any():
                self._engine.cancel(piece.ticket)
                results = self._engine.wait(piece.ticket, 0)
            results = self._excuse(piece.plan, results)
            self._parts.ledger.book(piece.plan, results, Operation.READ)
            found = codes(piece.plan, results, len(piece.which))
            good = np.flatnonzero(found == 0)
            found[good] = self._copy(request.some(piece.which[good]), good, piece.extent)
            return found
        finally:
            self._give_back(piece)

    def _excuse(self, planned: Plan, results: Results) -> Results:
        """-EIO where a file was cut off becomes -ENODATA: the drive is innocent, and asking again is of no use."""
        size = self._parts.segments.segment_size
        for at in np.flatnonzero(results == -errno.EIO).tolist():
            ioctx = planned.batch[at]
            segment, start = divmod(int(ioctx["offset"]), size)
            if self._parts.segments.beyond_end(int(ioctx["drive"]), segment, start + int(ioctx["length"])):
                results[at] = -errno.ENODATA
        return results

    def _copy(self, request: Request, places: _Which, extent: Extent) -> Codes:
        """Objects at `places` of the extent → their rows; (n,) GOOD or CORRUPT."""
        space = request.space
        base = np.uint64(extent.address) + places.astype(np.uint64) * np.uint64(space.object_size)
        source = tensor_addresses(base, space.strides)
        if not self._verify:
            memory.copy_rows(request.rows, source, space.sizes)
            return np.zeros(len(places), dtype=np.int32)
        roots = checksum.roots(checksum.copy_and_sum(request.rows, source, space.sizes))
        return np.where(roots == request.roots, 0, CORRUPT).astype(np.int32)

    def _give_back(self, piece: _Piece) -> None:
        """What the drive still owes stays where it may write: it returns when the answer comes."""
        self._engine.cancel(piece.ticket)
        if (self._engine.wait(piece.ticket, 0) == IN_PROGRESS).any():
            self._staging.quarantine(piece.extent, self._engine, piece.ticket)
        else:
            self._staging.release(piece.extent)
