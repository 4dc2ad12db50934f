"""The object store: put, get and lookup of pages, for any number of namespaces, shared by all processes that open
it."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tutti_sglang.config import Config
from tutti_sglang.engine.base import Engine, Registering
from tutti_sglang.engine.batch import IoClass
from tutti_sglang.engine.window import Window
from tutti_sglang.errors import CapacityError, StoreError
from tutti_sglang.memory import Addresses
from tutti_sglang.metrics import Metrics, process_metrics
from tutti_sglang.store.accepted import SHARE
from tutti_sglang.store.calls import Calls
from tutti_sglang.store.collect import Collected, collect
from tutti_sglang.store.evictor import Evictor
from tutti_sglang.store.filesystem import look_at
from tutti_sglang.store.getting import Getter
from tutti_sglang.store.growth import Growth
from tutti_sglang.store.keys import count, some, split
from tutti_sglang.store.layers import LayerReads, Layers
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.opening import close_parts, open_parts
from tutti_sglang.store.peer.fleet import Fleet, open_fleet
from tutti_sglang.store.peer.tier import Received
from tutti_sglang.store.publisher import Publisher
from tutti_sglang.store.putting import Putter
from tutti_sglang.store.room import Room
from tutti_sglang.store.sight import Flags, spot
from tutti_sglang.store.space import Space
from tutti_sglang.store.stats import StoreStats
from tutti_sglang.store.upkeep import Upkeep
from tutti_sglang.store.verify import Verifier, VerifyReport
from tutti_sglang.store.warming import warm
from tutti_sglang.store.writer import Writer
from tutti_sglang.units import format_size

T = TypeVar("T")

ABSENT, HERE, PEER = 0, 1, 2
"""Where `locate` found an object: nowhere, in this store, in the fleet."""

Places = npt.NDArray[np.uint8]
"""(n,) one per key."""

CLEAR_SECONDS = 5.0
"""How long `clear` tries while another process does not let it write, and goes on freeing room."""


class ObjectStore:
    """Thread safe, not fork safe. After opening, no call raises for I/O or stays beyond its deadline: what cannot be
    had is a miss, what cannot be stored is refused. Deadlines are time.monotonic() seconds; `keys` are n × 32 bytes;
    `rows` are (n, T) addresses of T tensors each, as long as the namespace says: an array that nobody changes during
    the call."""

    def __init__(self, config: Config, *, metrics: Metrics | None = None, engine: Engine | None = None) -> None:
        """Open or create. `engine`: instead of the one that `config` asks for; it is closed with the store. StoreError,
        ForeignStoreError, CapacityError, EngineError, ConfigError."""
        self._pid = os.getpid()
        self._parts = open_parts(config, metrics or process_metrics(), engine)
        self._growth = Growth(self._parts)
        evictor = Evictor(self._parts, self._growth)
        self._room = Room(self._parts, self._growth, evictor)
        self._publisher = Publisher(self._parts, self._room)
        self._upkeep = Upkeep(self._parts, self._room, self._growth, self._publisher, evictor)
        self._getter = Getter(self._parts)
        self._putter = Putter(self._parts)
        self._writer = Writer(self._parts, self._room, self._publisher, self._due)
        self._calls = Calls()
        self._closing = threading.Lock()
        self._closed = self._released = False
        self.fleet: Fleet | None = self._join_fleet()
        self._upkeep.begin()
        self._writer.start()

    def _due(self) -> list[Callable[[], None]]:
        return [*self._upkeep.due(), self._getter.tidy]

    def _join_fleet(self) -> Fleet | None:
        try:
            return open_fleet(self._parts, self._getter, self._putter)
        except BaseException:
            close_parts(self._parts, 0.0)
            raise

    @property
    def window(self) -> Window:
        """Where the scheduler tells what it runs."""
        return self._parts.window

    @property
    def pending(self) -> int:
        """Objects that are accepted and not written yet."""
        return len(self._parts.accepted)

    def attach(self, namespace: Namespace, *, share: bool = True) -> int:
        """The number of the namespace in this store. `share`: with the fleet, where there is one. StoreError;
        CapacityError when no object of it could be stored."""
        self._check_process()
        number = self._parts.index_drive.ask(partial(self._parts.index.namespace_id, namespace), None)
        if number is None:
            raise StoreError("The index does not answer", look_at(self._parts.config.index_path))
        space = Space(number, namespace.tensors)
        if space.object_size > SHARE * self._parts.staging.size:
            raise CapacityError(
                f"One page takes {format_size(space.object_size)}, too much for staging_size = "
                f"{format_size(self._parts.config.staging_size)}",
                "Raise staging_size, or choose a smaller --page-size",
            )
        self._growth.check_fits(space)
        self._parts.spaces[space.id] = space
        if share and self.fleet:
            self.fleet.attach(space, namespace.digest())
        return space.id

    def warm(self, ns: int) -> None:
        """Begin, beside the caller, to do what the first get would otherwise wait for."""
        self._check_process()
        self._writer.once(partial(warm, self._parts, self._parts.spaces[ns]))

    def register(self, address: int, size: int) -> None:
        """Memory of a device, which stays until the store is closed: rows of `layers` may lie there from now on.
        EngineError when the engine does not take it."""
        self._check_process()
        assert isinstance(self._parts.engine, Registering), "engine = gds"
        self._parts.engine.register(address, size)

    def lookup(self, ns: int, keys: bytes) -> Flags:
        """(n,) which objects a get would find now; for a while this process does not evict them. Waits for no writer
        and no drive."""

        def act() -> Flags:
            space = self._parts.spaces[ns]
            accepted = self._parts.accepted.contains(ns, split(keys)) if len(self._parts.accepted) else False
            sight = spot(self._parts, space, keys)
            self._parts.pins.pin(sight.slots[sight.claimed])
            self._getter.expect(space, keys)
            found = accepted | sight.claimed
            there = int(found.sum())
            self._parts.metrics.add("tutti_lookup_objects", there, outcome="found")
            self._parts.metrics.add("tutti_lookup_objects", len(found) - there, outcome="absent")
            return found

        return self._guard("lookup", act, np.zeros(count(keys), dtype=np.bool_))

    def locate(self, ns: int, keys: bytes) -> Places:
        """(n,) ABSENT, HERE or PEER: as `lookup`, and the fleet is asked for what is not here; for a tenth of a second
        at most."""
        here = self.lookup(ns, keys)
        fleet, missing = self.fleet, np.flatnonzero(~here)
        if fleet is None or not len(missing):
            return here.astype(np.uint8)
        asked = some(keys, missing)
        there = self._guard(
            "locate", lambda: fleet.locate(self._parts.spaces[ns], asked), np.zeros(len(missing), dtype=np.bool_)
        )
        places = here.astype(np.uint8)
        places[missing[there]] = PEER
        return places

    def take_received(self) -> Received:
        """What gets of this thread asked the fleet for since this was called before."""
        return self.fleet.take_received() if self.fleet else Received()

    def get(self, ns: int, keys: bytes, rows: Addresses, deadline: float, klass: IoClass = IoClass.DEMAND) -> Flags:
        """(n,) whether the object lies in its rows now, byte for byte as it was put; the fleet is asked for what is
        not here. The rows of the others hold anything; none is touched after this returned."""
        return self._guard(
            "get",
            lambda: self._getter.get(self._parts.spaces[ns], keys, rows, deadline, klass),
            np.zeros(count(keys), dtype=np.bool_),
        )

    @contextlib.contextmanager
    def layers(self, ns: int, keys: bytes) -> Iterator[Layers]:
        """Read the objects by tensors: their slots stay theirs, for `grace_seconds` at most, until the block ends."""
        self._check_process()
        with self._calls:
            reads = self._guard(
                "layers", lambda: LayerReads(self._parts, self._parts.spaces[ns], keys, self._getter.judge), None
            )
            layers = Layers(self._guard, reads, count(keys))
            try:
                yield layers
            finally:
                layers.close()

    def put(self, ns: int, keys: bytes, rows: Addresses, deadline: float, *, depth: int = 0) -> Flags:
        """(n,) whether the object is stored, or accepted: served from memory of this process and written soon. `depth`:
        pages before the first of these in its prefix. Rows are not touched after this returned."""
        return self._guard(
            "put",
            lambda: self._putter.put(self._parts.spaces[ns], keys, rows, deadline, depth),
            np.zeros(count(keys), dtype=np.bool_),
        )

    def take_accepted(self) -> int:
        """Payload bytes that puts of this thread took in since this was called before: of what was not there yet."""
        return self._putter.take_accepted()

    def drain(self, timeout: float) -> bool:
        """Wait until what was accepted is stored (or lost); False after `timeout` seconds."""
        return self._guard("drain", lambda: self._parts.accepted.drain(time.monotonic() + timeout), False)

    def clear(self, ns: int) -> int:
        """Remove all objects of the namespace; how many they were. They are out of sight at once, for all processes;
        where they are too many for CLEAR_SECONDS, their room comes free in the background."""

        def act() -> int:
            self._getter.forget()
            if self.fleet:
                self.fleet.forget(self._parts.spaces[ns])
            if not self._publisher.commit.acquire(timeout=CLEAR_SECONDS):
                raise StoreError("The index does not answer", look_at(self._parts.config.index_path))
            try:
                gone = self._parts.accepted.clear(ns)
            finally:
                self._publisher.commit.release()
            return gone + self._parts.index_drive.ask(partial(self._clear, ns), 0, 2 * CLEAR_SECONDS)

        return self._guard("clear", act, 0)

    def _clear(self, ns: int) -> int:
        until = time.monotonic() + CLEAR_SECONDS
        while True:
            try:
                gone = self._parts.index.clear(ns)
                break
            except StoreError:  # SGLang reports success whatever it is told: try for as long as one may
                if time.monotonic() > until:
                    raise
        with contextlib.suppress(StoreError):  # counted, and upkeep goes on with it
            self._upkeep.purge(until)
        return gone

    def verify(
        self, repair: bool = False, ns: int | None = None, progress: Callable[[int], None] = lambda _: None
    ) -> VerifyReport:
        """Read and compare every object of the namespace, or of all and the accounts too. Takes as long as reading the
        drives takes. With `repair`, what is wrong is removed or made again. `progress` is told the payload bytes of
        each piece. StoreError."""
        self._check_process()
        with self._calls:
            return Verifier(self._parts, self._growth, repair, progress).run(ns)

    def collect(self, unused_for: float = float("inf"), ns: int | None = None) -> Collected:
        """Give back what nobody needs: namespaces (all, or only `ns`) without a hit or a write for `unused_for`
        seconds, then the files of segments that hold nothing. StoreError."""
        self._check_process()
        with self._calls:
            return collect(self._parts, self._growth, unused_for, ns)

    def stats(self) -> StoreStats:
        """Figures that cost nothing to tell."""
        return StoreStats.of(self._parts, self._upkeep.usage)

    def describe(self) -> str:
        """One honest line: drives, capacity, how they are driven and why not better."""
        parts, used = self._parts, self._parts.segments.used()
        drives = "; ".join(each.describe(used.get(number, 0)) for number, each in parts.drives.items())
        config = parts.config
        return (
            f"{drives} | index {config.index_path} | engine {parts.engine.name} ({parts.engine_note}) | checksum "
            f"{config.checksum}, fsync {config.fsync}, segments of {format_size(parts.segments.segment_size)}, staging "
            f"{format_size(parts.staging.size)}" + (f" | {self.fleet.describe()}" if self.fleet else "")
        )

    def close(self, timeout: float = 9.0) -> bool:
        """Write what was accepted, then give everything back; False when that was not finished within `timeout`
        seconds: then what is still in use stays as it is, and another `close` may find it free. Idempotent."""
        if os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout
        with self._closing:
            self._closed = True
            left = self.fleet is None or self.fleet.leave(deadline)
            written = self._writer.stop(deadline) and left
            if not self._released and written and self._calls.wait_for_none(deadline):
                leave, seconds = partial(self._leave, deadline), max(0.0, deadline - time.monotonic())
                self._guard("close", lambda: self._parts.index_drive.ask(leave, None, seconds), None, closing=True)
            if self._released:
                self._parts.index_drive.close()
            return self._released

    def _leave(self, deadline: float) -> None:
        if self._released:
            return
        self._getter.forget()
        try:
            self._room.leave()
        except StoreError as error:  # the next one to open the store reclaims them
            self._parts.reporter.warn("leave", str(error))
        if close_parts(self._parts, deadline):
            if self.fleet:
                self.fleet.close()
            self._released = True

    def _guard(self, call: str, act: Callable[[], T], otherwise: T, closing: bool = False) -> T:
        """What SGLang sees of an exception is `otherwise`."""
        self._check_process()
        with self._calls:
            if (self._closed or self._parts.gone.is_set()) and not closing:
                return otherwise
            try:
                return act()
            except (StoreError, OSError) as error:
                self._parts.reporter.warn(f"{call} {type(error).__name__}", f"{call}: {error}")
            except Exception:  # noqa: BLE001
                self._parts.metrics.add("tutti_call_errors", call=call)
                self._parts.reporter.failed(call)
            return otherwise

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                "The store was opened before fork(): its threads and locks belong to the parent process",
                "Open the store in the process that uses it, or start processes with spawn",
            )
