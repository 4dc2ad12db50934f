"""Reads that drives write where the bytes are wanted, with no staging between: for engines that reach such memory.

There is no giving up here: as long as a drive may still write, the memory is its own. Bytes are compared with their
checksums where they landed.
"""

import contextlib
import time
from typing import NamedTuple

import numpy as np

from tutti_sglang import checksum
from tutti_sglang.engine.base import Straight
from tutti_sglang.engine.batch import IN_PROGRESS, Operation, Ticket
from tutti_sglang.engine.moving import Moved, land
from tutti_sglang.engine.plan import plan_rows
from tutti_sglang.store.outcome import CORRUPT, Codes, codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.plan import objects_of
from tutti_sglang.store.reader import Request

_ASK_SECONDS = 1.0


class Begun(NamedTuple):
    """A read that is under way: its request, its I/O, and the window that stays open until it ends."""

    request: Request
    ticket: Ticket
    window: contextlib.ExitStack


class StraightReads:
    """For one thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._engine = parts.engine

    def reach(self, request: Request) -> bool:
        """Whether the engine can be given these rows: whole blocks on the drive, which it reaches in memory."""
        engine = self._engine
        if not isinstance(engine, Straight) or not len(request.slots):
            return False
        strides = request.space.strides if request.tensors is None else request.space.strides[request.tensors]
        return bool((strides == request.sizes).all()) and engine.reaches(request.rows, strides)

    def begin(self, request: Request) -> Begun:
        """Start it; `end` must follow. EngineError when the engine is closed."""
        objects = objects_of(request.geometries, request.slots, request.tensors)
        batch = plan_rows(objects, request.rows, Operation.READ, request.klass)
        with contextlib.ExitStack() as window:
            window.enter_context(self._parts.window.reading(objects.cycle, request.klass))
            ticket = self._engine.submit(batch, request.klass, request.deadline)
            return Begun(request, ticket, window.pop_all())

    def cancel(self, begun: Begun) -> None:
        """What has not started of it ends."""
        self._engine.cancel(begun.ticket)

    def end(self, begun: Begun) -> Codes:
        """(n,) GOOD where the tensors of the object lie in its rows, else an errno. No row is written after this has
        returned, which may be long after the deadline."""
        request = begun.request
        with begun.window:
            moved = land(self._engine, begun.ticket, max(0.0, request.deadline - time.monotonic()))
            if _hangs(moved):
                moved = self._outwait(begun, moved)
        self._parts.ledger.book(moved, Operation.READ)
        self._parts.segments.leave_direct_io(moved.failed)
        found = codes(moved, len(request.slots))
        if self._parts.verifying:
            whole = np.flatnonzero(found == 0)
            roots = checksum.roots(checksum.sums(request.rows[whole], request.sizes))
            found[whole[roots != request.roots[whole]]] = CORRUPT
        return found

    def _outwait(self, begun: Begun, moved: Moved) -> Moved:
        """The deadline has come, and a drive may still write: it goes out of service, and nobody goes on before it has
        answered."""
        self._parts.ledger.book(moved, Operation.READ)
        start = time.monotonic()
        self._engine.cancel(begun.ticket)
        while _hangs(moved := land(self._engine, begun.ticket, _ASK_SECONDS)):
            pass
        self._parts.metrics.add("tutti_load_overdue_seconds", time.monotonic() - start)
        return moved


def _hangs(moved: Moved) -> bool:
    return bool((moved.failed["result"] == IN_PROGRESS).any())
