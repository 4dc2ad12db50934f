"""Whole objects, planned and moved in one call.

The native engine does each of these in one foreign call: arithmetic, waiting and copying hold no GIL, and beside a busy
Python thread each way back would cost up to a switch interval (5 ms). For other engines the same is done here.
"""

import enum
import time
from collections import deque
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum, memory
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import IN_PROGRESS, IOCTX_DTYPE, Batch, IoClass, Operation, Results, Ticket
from tutti_sglang.engine.plan import Objects, object_addresses, plan, plan_rows, tensor_addresses
from tutti_sglang.errors import EngineError
from tutti_sglang.memory import Addresses


class State(enum.IntEnum):
    """What became of an object that was to be read."""

    NEVER = 0  # the deadline came, or the engine was closed, before it was asked for
    WHOLE = 1  # it is in its rows
    ALTERED = 2  # something is in its rows, but its root is another one
    FAILED = 3  # some of its I/O is among the failed; its rows are as they were


class Move(NamedTuple):
    """Objects whose tensors lie, or are to lie, at (n, t) `rows` in staging; the rest is as of Engine.submit."""

    objects: Objects
    rows: Addresses
    operation: Operation
    klass: IoClass
    deadline: float
    hold: Any = None


class Moved(NamedTuple):
    """What became of I/O.

    failed: (f,) IOCTX that did not move whole, `result` and `tag` (the object) set; counts, nbytes: (drives,) how many
    IOCTX each drive was given, and their bytes.
    """

    failed: Batch
    counts: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]


class Read(NamedTuple):
    """n objects to read through little staging: piece i lies where piece i - len(lanes) lay before.

    rows: (n, t) where their tensors are to be copied, None of what is read ahead; sizes: (t,) bytes of each, > 0;
    roots: (n,) what the roots of their checksums must be, None: do not compare; lanes: addresses of `step` objects
    each; hold: as in Engine.submit; straight: no lanes, the drives write into the rows, which are whole blocks, and
    there is no giving up what they have begun: for a Mover.
    """

    objects: Objects
    rows: Addresses | None
    sizes: npt.NDArray[np.integer[Any]]
    roots: Sums | None
    lanes: list[int]
    step: int
    klass: IoClass
    deadline: float
    hold: Any = None
    straight: bool = False


class Begun(Protocol):
    """A Read without rows whose first pieces are under way. Hand it to `read` or to `abandon`, once."""

    request: Read
    tickets: dict[int, Ticket]


class Got(NamedTuple):
    """What became of it.

    states: (n,) State; moved: the I/O; open: lane → ticket of the piece whose memory there the drives still own;
    begun: what was asked for ahead, where that was begun.
    """

    states: npt.NDArray[np.uint8]
    moved: Moved
    open: dict[int, Ticket]
    begun: Begun | None = None


@runtime_checkable
class Mover(Protocol):
    """An engine that does all of it by itself; see the functions of the same names."""

    def read(self, request: Read, begun: Begun | None = None, ahead: Read | None = None) -> Got:
        """As `read`."""

    def abandon(self, begun: Begun) -> dict[int, Ticket]:
        """As `abandon`."""

    def launch(self, move: Move) -> Ticket:
        """As `launch`."""

    def land(self, ticket: Ticket, timeout: float) -> Moved:
        """As `land`."""


def read(engine: Engine, request: Read, begun: Begun | None = None, ahead: Read | None = None) -> Got:
    """Read, copy and compare until the deadline. No row is written after this has returned. `begun`: the same objects,
    without rows. `ahead`: what may be asked for next, begun as soon as all of the request is under way, by engines that
    can. Raises EngineError when the engine is closed."""
    return engine.read(request, begun, ahead) if isinstance(engine, Mover) else _Loop(engine, request).run()


def abandon(engine: Engine, begun: Begun) -> dict[int, Ticket]:
    """Nobody asks for it any more; lane → ticket of the piece whose memory there the drives still own."""
    assert isinstance(engine, Mover)
    return engine.abandon(begun)


def launch(engine: Engine, move: Move) -> Ticket:
    """Start it. Raises EngineError when the engine is closed."""
    if isinstance(engine, Mover):
        return engine.launch(move)
    batch = plan_rows(move.objects, move.rows, move.operation, move.klass)
    return engine.submit(batch, move.klass, move.deadline, move.hold)


def land(engine: Engine, ticket: Ticket, timeout: float) -> Moved:
    """Wait at most `timeout` seconds for what `launch` started. With a failure of -EINPROGRESS: call again, or leave
    buffer and slot in quarantine until Engine.wait says it is over."""
    if isinstance(engine, Mover):
        return engine.land(ticket, timeout)
    return _moved(ticket.batch, engine.wait(ticket, timeout))


def _moved(batch: Batch, results: Results) -> Moved:
    bad = np.flatnonzero(results != batch["length"])
    failed = batch[bad]
    failed["result"] = results[bad]
    counts = np.bincount(batch["drive"]).astype(np.uint64)
    nbytes = np.bincount(batch["drive"], weights=batch["length"]).astype(np.uint64)
    return Moved(failed, counts, nbytes)


class _Loop:
    """The twin of kernels/host/moving.cpp."""

    def __init__(self, engine: Engine, request: Read) -> None:
        assert request.rows is not None
        self._engine, self._request, self._rows = engine, request, request.rows
        order = request.objects.order()
        self._pieces = [order[start : start + request.step] for start in range(0, len(order), request.step)]
        self._states = np.full(len(order), State.NEVER, dtype=np.uint8)
        self._batches: list[tuple[Batch, Results]] = []
        self._open: dict[int, Ticket] = {}

    def run(self) -> Got:
        """As `read`."""
        lanes = len(self._request.lanes)
        todo = deque(range(len(self._pieces)))
        flying: deque[tuple[int, Ticket]] = deque()
        while todo or flying:
            while todo and len(flying) + len(self._open) < lanes and time.monotonic() < self._request.deadline:
                try:
                    flying.append((todo[0], self._start(todo[0])))
                    todo.popleft()
                except EngineError:  # closed meanwhile: what is under way has to end before anybody gets its memory
                    if not (flying or self._open):
                        raise
                    todo.clear()
            if not flying:
                break
            self._finish(*flying.popleft())
        parts = [_moved(*each) for each in self._batches]
        width = self._request.objects.drives
        moved = Moved(
            np.concatenate([np.empty(0, dtype=IOCTX_DTYPE), *(part.failed for part in parts)]),
            _added([part.counts for part in parts], width),
            _added([part.nbytes for part in parts], width),
        )
        return Got(self._states, moved, self._open)

    def _base(self, piece: int) -> Addresses:
        request = self._request
        size = int(request.objects.strides.sum())
        return object_addresses(request.lanes[piece % len(request.lanes)], len(self._pieces[piece]), size)

    def _start(self, piece: int) -> Ticket:
        request, mine = self._request, self._pieces[piece]
        batch = plan(request.objects.some(mine), self._base(piece), Operation.READ, request.klass)
        batch["tag"] = mine[batch["tag"]]
        return self._engine.submit(batch, request.klass, request.deadline, request.hold)

    def _finish(self, piece: int, ticket: Ticket) -> None:
        request, mine = self._request, self._pieces[piece]
        results = self._engine.wait(ticket, max(0.0, request.deadline - time.monotonic()))
        if (results == IN_PROGRESS).any():
            self._engine.cancel(ticket)
            results = self._engine.wait(ticket, 0)
            if (results == IN_PROGRESS).any():
                self._open[piece % len(request.lanes)] = ticket
        self._batches.append((ticket.batch, results))
        self._states[mine] = State.WHOLE
        self._states[ticket.batch["tag"][results != ticket.batch["length"]]] = State.FAILED
        good = self._states[mine] == State.WHOLE
        whole, source = mine[good], tensor_addresses(self._base(piece)[good], request.objects.strides)
        rows = self._rows[whole], source, request.sizes
        if request.roots is None:
            memory.copy_rows(*rows)
        else:
            roots = checksum.roots(checksum.copy_and_sum(*rows))
            self._states[whole[roots != request.roots[whole]]] = State.ALTERED


def _added(parts: list[npt.NDArray[np.uint64]], width: int) -> npt.NDArray[np.uint64]:
    total = np.zeros(width, dtype=np.uint64)
    for part in parts:
        total[: len(part)] += part
    return total
