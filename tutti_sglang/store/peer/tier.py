"""What the object store does with a fleet: asks it for what is missing here, and shares what others may miss."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.config import PeerConfig
from tutti_sglang.memory import Addresses
from tutti_sglang.store.keys import count, some
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.peer.base import State
from tutti_sglang.store.peer.link import Call, Link, Load
from tutti_sglang.store.peer.memory import SharedMemory
from tutti_sglang.store.peer.mooncake import require
from tutti_sglang.store.peer.wire import Wire
from tutti_sglang.store.sight import Flags
from tutti_sglang.store.space import Space

LOOKUP_SECONDS = 0.1
"""A lookup waits no longer for the fleet."""

LANES = 4
"""Pieces of a get under way at once, each in a quarter of what the memory has for gets."""

Which = npt.NDArray[np.int64]


class Received(NamedTuple):
    """Payload bytes that came for a thread, and the seconds that took; where the fleet failed, all it was asked for."""

    nbytes: int = 0
    seconds: float = 0.0


class Arrival(NamedTuple):
    """Objects that came and were verified; they lie in `load` at `base`."""

    space: Space
    keys: bytes
    base: Addresses
    depth: npt.NDArray[np.uint32]
    load: Load


class PeerTier:
    """Thread safe. `keep`: takes what arrived, and gives its memory back; False where it does not take it."""

    def __init__(self, parts: Parts, settings: PeerConfig) -> None:
        """ConfigError where the engine is not installed; StoreError for want of memory."""
        require()
        self._parts, self.settings = parts, settings
        self.memory = SharedMemory(settings.memory)
        self.link = Link(settings, self.memory, self._report)
        self.link.on_change = lambda works: parts.metrics.set("tutti_peer_in_service", int(works))
        self.keep: Callable[[Arrival], bool] = lambda _: False
        self._wires: dict[int, Wire] = {}
        self._thread = threading.local()
        parts.metrics.set("tutti_peer_in_service", 0)

    @property
    def serves(self) -> bool:
        """Whether the fleet is asked now."""
        return self.link.breaker.closed

    def attach(self, space: Space, digest: bytes) -> None:
        """Share the objects of a namespace, unless one is too large."""
        wire = Wire(digest, space.tensors)
        if wire.stride * 2 * LANES > self.memory.size:
            self._parts.reporter.warn(
                "peer size", f"peer.memory is too small for pages of {wire.size} bytes: they are not shared"
            )
        else:
            self._wires[space.id] = wire

    def wire(self, space: Space) -> Wire | None:
        """How its objects travel; None where they do not."""
        return self._wires.get(space.id)

    def locate(self, space: Space, keys: bytes) -> Flags:
        """(n,) which objects the fleet has."""
        found = np.zeros(count(keys), dtype=np.bool_)
        wire = self.wire(space)
        if wire is None or not len(found):
            return found
        states = self.link.ask("exists", wire.names(keys), time.monotonic() + LOOKUP_SECONDS)
        if states is not None:
            self.link.breaker.worked(moved=False)
            found |= np.array(states) == State.DONE
        there = int(found.sum())
        self.count("lookup", found=there, absent=len(found) - there)
        return found

    def get(self, space: Space, keys: bytes, rows: Addresses, deadline: float) -> Flags:
        """(n,) whether the object came and lies in its rows, byte for byte as it was put. Rows of the others hold
        anything; none is touched after this returned."""
        good = np.zeros(len(rows), dtype=np.bool_)
        wire = self.wire(space)
        if wire is None or not self.serves:
            return good
        start, asked = time.monotonic(), 0
        step = max(1, self.memory.size // (2 * LANES) // wire.stride)
        todo = deque(np.arange(at, min(at + step, len(good))) for at in range(0, len(good), step))
        flying: deque[tuple[Which, Call, Load]] = deque()
        try:
            while todo or flying:
                while todo and len(flying) < LANES and (begun := self._begin(wire, some(keys, todo[0]), deadline)):
                    flying.append((todo.popleft(), *begun))
                if not flying:
                    break
                which, call, load = flying.popleft()
                good[which] = self._end(space, wire, some(keys, which), rows[which], (call, load))
                if call.states is None:
                    todo.clear()
                    asked = len(good)
        finally:
            for _, call, load in flying:  # only after an exception
                self._give_back(self.link.end(call), load)
        came = int(good.sum())
        self._note(Received((asked or came) * space.payload, time.monotonic() - start))
        self._parts.metrics.add("tutti_hit_objects", came, tier="peer")
        self._parts.metrics.add("tutti_bytes", came * space.payload, op="receive")
        return good

    def take_received(self) -> Received:
        """What this thread's gets asked the fleet for since it last asked."""
        found: Received = getattr(self._thread, "received", Received())
        self._thread.received = Received()
        return found

    def forget(self, space: Space) -> None:
        """Remove the objects of a namespace from the fleet's memory, without waiting. What other nodes keep stays."""
        if wire := self.wire(space):
            self.link.begin("remove", [wire.prefix], time.monotonic() + self.settings.timeout)

    def base(self, load: Load) -> Addresses:
        """(n,) where its objects lie in this process."""
        return np.array(load.offsets, dtype=np.uint64) + np.uint64(self.memory.address)

    def count(self, operation: str, **outcomes: int) -> None:
        """Objects, by what became of them."""
        for outcome, objects in outcomes.items():
            self._parts.metrics.add("tutti_peer_objects", objects, op=operation, outcome=outcome)

    def describe(self) -> str:
        """For the start-up line."""
        one = self.settings
        return f"peer {one.kind} at {one.master} over {one.protocol}, publish {one.publish}, keep {one.keep}"

    def _begin(self, wire: Wire, keys: bytes, deadline: float) -> tuple[Call, Load] | None:
        span = self.memory.take(count(keys) * wire.stride, min(deadline, time.monotonic() + LOOKUP_SECONDS))
        if span is None:
            self.count("get", crowded=count(keys))
            return None
        load = Load.of(span, count(keys), wire.stride, wire.size)
        until = min(deadline, time.monotonic() + self.settings.timeout)
        call = self.link.begin("get", wire.names(keys), until, load)
        if call is None:
            self.memory.give(span)
            return None
        return call, load

    def _end(self, space: Space, wire: Wire, keys: bytes, rows: Addresses, way: tuple[Call, Load]) -> Flags:
        call, load = way
        good = np.zeros(len(rows), dtype=np.bool_)
        states = self.link.end(call).states
        if states is None:
            self.count("get", **{"late" if call.abandoned else "failed": len(good)})
            self._give_back(call, load)
            return good
        found = np.array(states, dtype=np.int64)
        which = np.flatnonzero(found == State.DONE)
        depth = np.zeros(len(good), dtype=np.uint32)
        if len(which):
            base = self.base(load)
            good[which], depth[which] = wire.open(base[which], some(keys, which), rows[which])
        wrong = len(which) - int(good.sum())
        if wrong:
            self._parts.reporter.warn("peer wrong", f"{wrong} objects of the fleet were not what they should be")
        failed = int((found == State.FAILED).sum())
        self.count("get", found=int(good.sum()), absent=int((found == State.ABSENT).sum()), failed=failed, wrong=wrong)
        if failed == len(good):
            self.link.breaker.failed("no object arrived")
        else:
            self.link.breaker.worked(moved=bool(good.any()))
        came = np.flatnonzero(good)
        arrival = Arrival(space, some(keys, came), self.base(load)[came], depth[came], load)
        if not (len(came) and self.settings.keep and self.keep(arrival)):
            self._give_back(call, load)
        return good

    def _give_back(self, call: Call, load: Load) -> None:
        if not call.abandoned:
            self.memory.give(load.span)

    def _note(self, received: Received) -> None:
        before = self.take_received()
        self._thread.received = Received(before.nbytes + received.nbytes, before.seconds + received.seconds)

    def _report(self, message: str) -> None:
        self._parts.reporter.warn("peer", message)
