"""The native engine: io_uring, or native threads where it is refused; one foreign call per submit and per wait."""

import ctypes
import errno
import os
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, IoClass, Results, Ticket
from tutti_sglang.engine.home import Home
from tutti_sglang.engine.moving import Begun, Got, Move, Moved, Read
from tutti_sglang.engine.packed import MovedRoom, PackedObjects, PackedRead
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import native

POOL_WORKERS = 16
"""Threads per drive where io_uring is refused: they fill a drive with 1 MiB transfers, and a container bears them."""

MOST_IN_FLIGHT, MOST_BYTES = 4096, 1 << 30
"""Limits of queue_depth and max_io, beyond which nothing is gained and the kernel cuts by itself."""

_LATEST = 1 << 62  # nanoseconds: 146 years after boot

_REASONS = {
    0: "",
    errno.ECANCELED: "io_uring was left aside",
    errno.EPERM: "io_uring is forbidden (EPERM) by a container's seccomp profile or sysctl kernel.io_uring_disabled",
    errno.ENOSYS: "the kernel has no io_uring, or a seccomp profile hides it (ENOSYS)",
    errno.ENOMEM: "io_uring finds no locked memory (ENOMEM): raise `ulimit -l`",
    errno.EMFILE: "io_uring finds no file descriptor (EMFILE): raise `ulimit -n`",
    errno.EOPNOTSUPP: "the kernel's io_uring is older than 5.6",
}

_orphans: list[Any] = []  # memory that a drive may still write to although its engine is gone: kept for good


class Memory(Protocol):
    """A span of memory, as Staging is."""

    address: int
    size: int


class Counters(NamedTuple):
    """What an engine has done since it was made.

    contexts: IOCTX started; transfers: groups of them, or pieces of long ones; bytes: of these; resumed: system calls
    after a short one; retried: IOCTX tried alone after their transfer failed.
    """

    contexts: int
    transfers: int
    bytes: int
    resumed: int
    retried: int


class _Options(ctypes.Structure):
    """`struct tutti_options` of kernels/host/abi.hpp."""

    _fields_ = (
        ("segment_size", ctypes.c_uint64),
        ("staging_address", ctypes.c_uint64),
        ("staging_size", ctypes.c_uint64),
        ("max_io", ctypes.c_uint32),
        ("queue_depth", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("pool", ctypes.c_uint32),
        ("faults", ctypes.c_void_p),
    )


def uring_refused() -> str:
    """Why io_uring cannot be used in this process, found by trying; empty when it can, or without a library to try."""
    library = native.library()
    return _reason(library.tutti_uring_probe()) if library else ""


class _NativeTicket(Ticket):
    """A batch that the library owns; it forgets it when the last one who could ask is gone. `handle` is 0 when it was
    given back to the library. Of a batch that the library
    planned, `batch` has the length alone; `drives`: one more than the highest ordinal in it."""

    def __init__(self, batch: Batch, handle: int, hold: Any, engine: "UringEngine") -> None:
        super().__init__(batch)
        self.handle, self.hold, self.engine = handle, hold, engine
        self.drives = 0

    def __del__(self) -> None:
        if self.handle and self.engine.here():
            self.engine.library.tutti_ticket_release(self.handle)


class UringEngine:
    """The protocol is `engine.base.Engine`. `name` is "uring", or "pool" where io_uring is refused."""

    def __init__(
        self,
        segment_size: int,
        *,
        queue_depth: int = 32,
        max_io: int = 1 << 20,
        staging: Memory | None = None,
        faults: npt.NDArray[np.void] | None = None,
        pool: bool = False,
    ) -> None:
        """`segment_size`, `max_io` (of one transfer) in bytes; `queue_depth`: transfers in flight per drive; `staging`:
        registered with the drives where the limits allow it; `faults`: a packed FaultPlan; `pool`: io_uring left aside.

        Starts no thread yet. Raises EngineError where the native library was not built."""
        library = native.library()
        if library is None:
            raise EngineError(f"No native engine: {native.unavailable_reason()}", "Use engine = threads")
        self.library = library
        self._home = Home()
        self._live: dict[int, _NativeTicket] = {}
        self._closed = False
        start, size = (staging.address, staging.size) if staging else (0, 0)
        plan = None if faults is None else faults.ctypes.data
        depth = min(queue_depth, MOST_IN_FLIGHT)
        options = _Options(segment_size, start, size, min(max_io, MOST_BYTES), depth, POOL_WORKERS, pool, plan)
        self._handle: int = library.tutti_engine_open(ctypes.addressof(options))
        self.name = "pool" if self.refused else "uring"

    @property
    def refused(self) -> str:
        """Why threads do the work of io_uring, on some drive at least; empty when they do not."""
        return _reason(self.library.tutti_engine_refused(self._handle))

    @property
    def registered(self) -> int:
        """Bytes of staging that are registered so far: the first piece when a ring has started, others when they are
        used."""
        return int(self.library.tutti_engine_registered(self._handle))

    @property
    def counters(self) -> Counters:
        """The sums over all drives."""
        values = (ctypes.c_uint64 * len(Counters._fields))()
        self.library.tutti_engine_counters(self._handle, values)
        return Counters(*values)

    def attach(self, drive: int, segment: int, fd: int) -> None:
        """As Engine.attach; the first file of a drive starts its ring and thread."""
        self._check()
        error = self.library.tutti_engine_attach(self._handle, drive, segment, fd)
        if error == -errno.ESHUTDOWN:
            raise EngineError("The I/O engine is closed")
        if error == -errno.EAGAIN:
            raise EngineError(
                f"There is no thread to be had for drive {drive}", "Raise `ulimit -u` or the container's limit"
            )
        if error:
            raise EngineError(f"Segment {segment} has a file already", "Detach it first")

    def detach(self, drive: int, segment: int, timeout: float = 5.0) -> bool:
        """As Engine.detach."""
        self._home.check()
        return bool(self.library.tutti_engine_detach(self._handle, drive, segment, _nanoseconds(timeout)))

    def submit(self, batch: Batch, klass: IoClass, deadline: float, hold: Any = None) -> Ticket:
        """As Engine.submit."""
        self._check()
        assert batch.dtype == IOCTX_DTYPE
        assert batch.ndim == 1
        batch = np.ascontiguousarray(batch)
        self._sweep()
        handle = self.library.tutti_engine_submit(
            self._handle, batch.ctypes.data, len(batch), klass, _nanoseconds(deadline)
        )
        if not handle:
            raise EngineError("The I/O engine is closed")
        return self._keep(batch, handle, hold)

    def wait(self, ticket: Ticket, timeout: float) -> Results:
        """As Engine.wait."""
        self._home.check()
        assert isinstance(ticket, _NativeTicket)
        results = np.empty(len(ticket.batch), dtype=np.int32)
        out = results.ctypes.data
        done = self.library.tutti_engine_poll(self._handle, ticket.handle, out)
        if not done and timeout > 0:
            done = self.library.tutti_engine_wait(self._handle, ticket.handle, _nanoseconds(timeout), out)
        if done:
            self._forget(ticket)
            self._sweep()
        return results

    def read(self, request: Read, begun: Begun | None = None, ahead: Read | None = None) -> Got:
        """As engine.moving.read, in one foreign call."""
        self._check()
        self._sweep()
        after = PackedRead(ahead, _nanoseconds(ahead.deadline)) if ahead else None
        if begun is None:
            call = PackedRead(request, _nanoseconds(request.deadline))
        else:
            assert isinstance(begun, PackedRead)
            assert request.rows is not None
            call = begun
            call.aim(request.rows, request.roots, _nanoseconds(request.deadline))
            for ticket in call.tickets.values():
                self._give_away(ticket)
        self.library.tutti_engine_read(self._handle, call.address, after and after.address)
        if after:
            after.tickets = self._open(after)
        return Got(call.states, call.moved(), self._open(call), after if after and after.started else None)

    def abandon(self, begun: Begun) -> dict[int, Ticket]:
        """As engine.moving.abandon."""
        self._home.check()
        assert isinstance(begun, PackedRead)
        for ticket in begun.tickets.values():
            self.cancel(ticket)
        done = self.library.tutti_ticket_done
        return {lane: each for lane, each in begun.tickets.items() if not done(_native(each).handle)}

    def _open(self, call: PackedRead) -> dict[int, Ticket]:
        """Tickets of the pieces that are under way, by lane. (np.zeros would give the GIL away.)"""
        return {
            lane: self._keep(np.empty(count, IOCTX_DTYPE), handle, call.request.hold)
            for lane, (handle, count) in enumerate(zip(call.handles.tolist(), call.counts.tolist(), strict=True))
            if handle
        }

    def launch(self, move: Move) -> Ticket:
        """As engine.moving.launch, in one foreign call."""
        self._check()
        self._sweep()
        packed, rows = PackedObjects(move.objects), np.ascontiguousarray(move.rows)
        assert rows.dtype == np.uint64
        assert rows.size == packed.contexts
        handle = self.library.tutti_engine_launch(
            *(self._handle, packed.address, rows.ctypes.data),
            *(move.operation, move.klass, _nanoseconds(move.deadline)),
        )
        if not handle:
            raise EngineError("The I/O engine is closed")
        ticket = self._keep(np.empty(packed.contexts, IOCTX_DTYPE), handle, move.hold)
        ticket.drives = move.objects.drives
        return ticket

    def land(self, ticket: Ticket, timeout: float) -> Moved:
        """As engine.moving.land, in one foreign call."""
        self._home.check()
        assert isinstance(ticket, _NativeTicket)
        room = MovedRoom(len(ticket.batch), ticket.drives)
        if self.library.tutti_engine_land(self._handle, ticket.handle, _nanoseconds(timeout), room.address):
            self._forget(ticket)
            self._sweep()
        return room.moved()

    def cancel(self, ticket: Ticket) -> None:
        """As Engine.cancel."""
        self._home.check()
        assert isinstance(ticket, _NativeTicket)
        self.library.tutti_engine_cancel(self._handle, ticket.handle)

    def close(self, timeout: float) -> bool:
        """As Engine.close. A forked child has no I/O: there it does nothing."""
        if not self.here():
            return True
        self._closed = True
        idle = bool(self.library.tutti_engine_close(self._handle, _nanoseconds(timeout)))
        self._sweep()
        return idle

    def here(self) -> bool:
        """Whether this is the process that made the engine."""
        return self._home.here()

    def __del__(self) -> None:
        if not hasattr(self, "_handle") or not self.here():
            return
        if not self.close(0):
            _orphans.extend(ticket.hold for ticket in self._live.values())
        self.library.tutti_engine_free(self._handle)

    def _keep(self, batch: Batch, handle: int, hold: Any) -> _NativeTicket:
        ticket = _NativeTicket(batch, handle, hold, self)
        self._live[ticket.serial] = ticket
        return ticket

    def _give_away(self, ticket: Ticket) -> None:
        """The library releases it."""
        native_ticket = _native(ticket)
        self._forget(native_ticket)
        native_ticket.handle = 0

    def _sweep(self) -> None:
        """Let go of what is done and nobody has waited for."""
        for ticket in list(self._live.values()):
            # Another thread may have given one away meanwhile, though not between these two: the call keeps the GIL.
            if ticket.handle and self.library.tutti_ticket_done(ticket.handle):
                self._forget(ticket)

    def _forget(self, ticket: _NativeTicket) -> None:
        ticket.hold = None
        self._live.pop(ticket.serial, None)

    def _check(self) -> None:
        self._home.check()
        if self._closed:
            raise EngineError("The I/O engine is closed")


def _native(ticket: Ticket) -> _NativeTicket:
    assert isinstance(ticket, _NativeTicket)
    return ticket


def _nanoseconds(seconds: float) -> int:
    """Any float, infinite ones too, as int64."""
    return int(max(0.0, min(seconds, _LATEST / 1e9)) * 1e9)


def _reason(error: int) -> str:
    return _REASONS[error] if error in _REASONS else f"io_uring is refused: {os.strerror(error)}"
