"""Reads that drives write where the bytes are wanted, with no staging between: for engines that reach such memory.

There is no giving up here: as long as a drive may still write, the memory is its own. Bytes are compared with their
checksums where they landed, by whoever reaches them there.
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
from tutti_sglang.store.outcome import CORRUPT, GOOD, Codes, codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.plan import objects_of
from tutti_sglang.store.reader import Request
from tutti_sglang.store.target import Target, Which

_ASK_SECONDS = 1.0


class Begun(NamedTuple):
    """A read that is under way: its request, whose rows are those of `which` objects of the target; its I/O, and the
    window that stays open until it ends."""

    request: Request
    target: Target
    which: Which
    ticket: Ticket
    window: contextlib.ExitStack


class StraightReads:
    """For one thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._engine = parts.engine

    def reach(self, request: Request, *, padded: bool) -> bool:
        """Whether the engine can be given these rows, which it reaches in memory: a drive writes whole blocks, so there
        must be room for them (`padded`), or the tensors are whole blocks."""
        engine = self._engine
        if not isinstance(engine, Straight) or not len(request.slots):
            return False
        strides = request.strides
        return (padded or bool((strides == request.sizes).all())) and engine.reaches(request.rows, strides)

    def begin(self, request: Request, target: Target, which: Which) -> Begun:
        """Start it; `end` must follow. EngineError when the engine is closed."""
        objects = objects_of(request.geometries, request.slots, request.tensors)
        batch = plan_rows(objects, request.rows, Operation.READ, request.klass)
        with contextlib.ExitStack() as window:
            window.enter_context(self._parts.window.reading(objects.cycle, request.klass))
            ticket = self._engine.submit(batch, request.klass, request.deadline)
            return Begun(request, target, which, ticket, window.pop_all())

    def cancel(self, begun: Begun) -> None:
        """What has not started of it ends."""
        self._engine.cancel(begun.ticket)

    def end(self, begun: Begun) -> Codes:
        """(n,) GOOD where the tensors of the object are where they are wanted, else an errno. No row is written after
        this has returned, which may be long after the deadline."""
        request = begun.request
        with begun.window:
            moved = land(self._engine, begun.ticket, max(0.0, request.deadline - time.monotonic()))
            if _hangs(moved):
                moved = self._outwait(begun, moved)
        self._parts.ledger.book(moved, Operation.READ)
        if begun.target.reached:  # else it may be the device that was refused, and not the way to open a file
            self._parts.segments.leave_direct_io(moved.failed)
        found = codes(moved, len(request.slots))
        whole = np.flatnonzero(found == GOOD)
        verifying = self._parts.verifying
        if len(whole):
            sums = begun.target.landed(begun.which[whole], request.sizes, summed=verifying)
            if verifying:
                found[whole[checksum.roots(sums) != request.roots[whole]]] = CORRUPT
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
