"""One thread that brings accepted objects to the drives: slots, write, publish. No error ends it."""

import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IN_PROGRESS, IoClass, Operation, Ticket
from tutti_sglang.engine.moving import Move, land, launch
from tutti_sglang.engine.plan import Objects
from tutti_sglang.errors import StoreError
from tutti_sglang.geometry import Geometry
from tutti_sglang.memory import Addresses
from tutti_sglang.store.accepted import Cargo, Parcel
from tutti_sglang.store.outcome import FULL, GOOD, UNANSWERED, Codes, codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.plan import objects_of
from tutti_sglang.store.publisher import Publisher
from tutti_sglang.store.room import NONE, Room
from tutti_sglang.store.slots import Slots, segments_in, segments_of
from tutti_sglang.store.space import Space

LOAD_BYTES = 128 << 20
"""About what is written and published at once, and never more than an eighth of the store or a quarter of staging: the
next load is to be accepted and begun meanwhile."""
LOADS_IN_FLIGHT = 2

WRITE_SECONDS = 20.0
"""A drive that has not answered a write by then is out of service, and the object is lost."""

TICK_SECONDS = 0.5
"""How often `upkeep` is asked what is due."""
OVERDUE_SECONDS = 1.0
"""For so long duties give way to what is to be written: beside a busy Python thread all of them take 200 ms."""

Duties = list[Callable[[], None]]

_AGAIN = [errno.EIO, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EINVAL, *FULL]
"""Worth one more attempt."""

_Which = npt.NDArray[np.int64]


@dataclass
class _Load:
    """Objects of one namespace on their way. `held` keeps the files of their segments open, `window` the drives from
    reads."""

    space: Space
    parcels: list[Parcel]
    cargo: Cargo
    slots: Slots
    geometries: dict[int, Geometry]
    held: contextlib.ExitStack
    window: contextlib.ExitStack
    deadline: float
    ticket: Ticket


class Writer:
    """Takes parcels from `parts.accepted` until `stop`."""

    def __init__(self, parts: Parts, room: Room, publisher: Publisher, upkeep: Callable[[], Duties]) -> None:
        """`upkeep`: what is due, on this thread, between two loads."""
        self._parts = parts
        self._room = room
        self._publisher = publisher
        self._upkeep = upkeep
        self._load_bytes = min(LOAD_BYTES, parts.capacity // 8, parts.staging.size // 4)
        self._flying: deque[_Load] = deque()
        self._owed: list[tuple[Ticket, Slots]] = []
        self._once: deque[Callable[[], None]] = deque()
        self._due: deque[Callable[[], None]] = deque()
        self._next_tick = self._overdue_at = 0.0
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="tutti-writer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def once(self, duty: Callable[[], None]) -> None:
        """Have it done soon, beside the caller; nobody learns what became of it."""
        self._once.append(duty)
        self._parts.accepted.wake()

    def stop(self, deadline: float) -> bool:
        """Write what was accepted and end; False when that takes longer than until `deadline`."""
        self._stop_at = deadline
        self._parts.accepted.wake()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._done():
            while self._once:
                self._survive(self._once.popleft())
            self._survive(self._step)
            self._survive(self._keep_up)

    def _keep_up(self) -> None:
        """One duty, unless something is to be written."""
        now = time.monotonic()
        if not self._due and now >= self._next_tick:
            self._next_tick, self._overdue_at = now + TICK_SECONDS, now + OVERDUE_SECONDS
            self._due.extend((self._sweep, *self._upkeep()))
        if self._due and (now >= self._overdue_at or not self._parts.accepted.open):
            self._due.popleft()()

    def _survive(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (StoreError, OSError) as error:
            self._parts.reporter.warn(f"writer {type(error).__name__}", f"the writer: {error}")
        except Exception:  # noqa: BLE001
            self._parts.metrics.add("tutti_call_errors", call="writer")
            self._parts.reporter.failed("the writer")
            time.sleep(0.01)  # a bug that comes back at once must not take a core

    def _done(self) -> bool:
        if self._stop_at is None:
            return False
        idle = not self._flying and not self._parts.accepted.open
        return idle or time.monotonic() >= self._stop_at

    def _step(self) -> None:
        if len(self._flying) < (LOADS_IN_FLIGHT if self._parts.window.quiet else 1):
            stopping = self._stop_at is not None
            since = self._parts.accepted.oldest(0.0 if self._flying or self._due or stopping else TICK_SECONDS)
            if since is not None:
                hurry = stopping or self._parts.accepted.urgent
                with self._parts.window.turn(self._parts.window.drives, since, hurry=hurry) as mine:
                    if mine:
                        self._begin()
                    elif not self._flying:
                        self._parts.window.pause()
        if self._flying:
            self._land(self._flying.popleft())

    def _begin(self) -> None:
        """Start writing what was accepted, as much as the window has room for."""
        limit = 0 if self._parts.config.fsync == "each" else self._parts.window.most_bytes(self._load_bytes)
        by_space: dict[int, list[Parcel]] = {}
        for parcel in self._parts.accepted.take(limit):
            by_space.setdefault(parcel.namespace, []).append(parcel)
        for namespace, parcels in by_space.items():
            self._survive(partial(self._launch, self._parts.spaces[namespace], parcels))

    def _launch(self, space: Space, parcels: list[Parcel]) -> None:
        """Start writing; whatever goes wrong, the parcels end."""
        cargo = Cargo.of(parcels)
        slots = NONE
        held, window = contextlib.ExitStack(), contextlib.ExitStack()
        try:
            slots = self._room.take(space, len(cargo.keys))
            if len(slots) < len(cargo.keys) and self._flying:
                while self._flying:  # what is being written cannot be evicted
                    self._survive(partial(self._land, self._flying.popleft()))
                slots = self._room.take(space, len(cargo.keys), slots)
            geometries = held.enter_context(self._parts.segments.use(segments_in(slots), writing=True))
            openable = np.isin(segments_of(slots), list(geometries))
            self._room.give_back(slots[~openable])
            slots = slots[openable]
            self._lost("no room", len(cargo.keys) - len(slots))
            cargo = cargo.some(np.arange(len(slots)))
            if not len(slots):
                held.close()
                self._finish(parcels)
                return
            deadline, objects = self._deadline(), objects_of(geometries, slots)
            nbytes = len(slots) * space.object_size
            window.enter_context(self._parts.window.writing(objects.cycle, nbytes))
            ticket = self._write(objects, cargo.rows, deadline)
        except BaseException:
            window.close()
            held.close()
            self._lost("error", len(cargo.keys))
            self._finish(parcels)
            self._room.give_back(slots)
            raise
        self._flying.append(_Load(space, parcels, cargo, slots, geometries, held, window, deadline, ticket))

    def _land(self, load: _Load) -> None:
        """Wait for the writes and publish what arrived; whatever goes wrong, the parcels end."""
        found = np.full(len(load.slots), UNANSWERED, dtype=np.int32)
        published = np.zeros(len(load.slots), dtype=np.bool_)
        try:
            found = self._wait(load, load.ticket, len(found))
            again = np.flatnonzero(np.isin(found, _AGAIN))
            # What hangs is owed by the first ticket: one ticket must be able to answer for all of the load.
            if len(again) and not (found == UNANSWERED).any():
                self._survive(partial(self._again, load, again, found))
            load.window.close()  # the index may take its time to be written, and no read need wait for that
            good = np.flatnonzero(found == GOOD)
            if len(good):
                published[good] = self._publisher.publish(load.space, load.cargo.some(good), load.slots[good])
        finally:
            load.window.close()
            load.held.close()
            self._close(load, found, published)

    def _again(self, load: _Load, which: _Which, found: Codes) -> None:
        """One more attempt at objects that failed, after what can be done about the cause; updates `found`."""
        if np.isin(found[which], list(FULL)).any():
            self._survive(self._room.relieve)
        objects = objects_of(load.geometries, load.slots[which])
        load.ticket = self._write(objects, load.cargo.rows[which], self._deadline())
        found[which] = UNANSWERED
        found[which] = self._wait(load, load.ticket, len(which))

    def _write(self, objects: Objects, rows: Addresses, deadline: float) -> Ticket:
        """Start to write objects whose tensors lie at `rows` in staging."""
        move = Move(objects, rows, Operation.WRITE, IoClass.WRITE, deadline, self._parts.staging)
        return launch(self._parts.engine, move)

    def _wait(self, load: _Load, ticket: Ticket, objects: int) -> Codes:
        """What became of them, one code for each of those that `_write` was given."""
        engine = self._parts.engine
        moved = land(engine, ticket, max(0.0, self._deadline(load.deadline) - time.monotonic()))
        if (moved.failed["result"] == IN_PROGRESS).any():
            engine.cancel(ticket)
            moved = land(engine, ticket, 0)
        self._parts.ledger.book(moved, Operation.WRITE)
        self._parts.admission.wrote(moved.nbytes)
        self._parts.hits.wrote(load.space)
        self._parts.segments.leave_direct_io(moved.failed)
        return codes(moved, objects)

    def _close(self, load: _Load, found: Codes, published: npt.NDArray[np.bool_]) -> None:
        hung = found == UNANSWERED
        failed = ~hung & (found != GOOD)
        self._lost("write failed", int((hung | failed).sum()))
        self._lost("not published", int((~hung & ~failed & ~published & load.cargo.wanted()).sum()))
        self._parts.metrics.add("tutti_put_objects", int(published.sum()), outcome="written")
        self._parts.metrics.add("tutti_bytes", int(published.sum()) * load.space.payload, op="write")
        if hung.any():
            self._owed.append((load.ticket, load.slots[hung]))
        self._finish(load.parcels, dict.fromkeys(load.cargo.owner[hung].tolist(), load.ticket))
        self._room.give_back(load.slots[failed])

    def _finish(self, parcels: list[Parcel], owed: dict[int, Ticket] | None = None) -> None:
        self._parts.accepted.finish(parcels, self._parts.engine, owed or {})

    def _sweep(self) -> None:
        """Slots whose late writes have come back can be used again, and so can staging."""
        staging = self._parts.staging
        if staging.quarantined and (extent := staging.acquire(1)):
            staging.release(extent)  # it looks through its quarantine at every use, and nobody else may be using it
        still: list[tuple[Ticket, Slots]] = []
        for ticket, slots in self._owed:
            if (self._parts.engine.wait(ticket, 0) == IN_PROGRESS).any():
                still.append((ticket, slots))
            else:
                self._room.give_back(slots)
        self._owed = still

    def _deadline(self, latest: float | None = None) -> float:
        limits = [time.monotonic() + WRITE_SECONDS if latest is None else latest]
        return min(limits + ([self._stop_at] if self._stop_at is not None else []))

    def _lost(self, reason: str, objects: int) -> None:
        """Objects that were accepted and are gone: later misses."""
        if objects:
            self._parts.metrics.add("tutti_put_objects", objects, outcome="dropped")
            self._parts.reporter.warn(f"lost {reason}", f"{objects} accepted objects were not stored: {reason}")
