"""In the background, on one thread: what arrived is kept here, what was stored here is offered to the fleet.

Both are bounded, and dropped when they do not keep up. A publication starts in the windows in which writes may; what it
offers is read from memory while it lies there, else from the drives.
"""

import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IoClass
from tutti_sglang.store.admission import Seen
from tutti_sglang.store.getting import Getter
from tutti_sglang.store.keys import count, some
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.peer.base import State
from tutti_sglang.store.peer.link import Load
from tutti_sglang.store.peer.tier import Arrival, PeerTier
from tutti_sglang.store.putting import Putter
from tutti_sglang.store.sight import Flags, look
from tutti_sglang.store.space import Space

MOST_KEYS = 1 << 14
"""Objects that wait to be published at most: half a MiB of keys."""

READ_SECONDS = 5.0
"""For reading what is to be published."""

_IDLE = 0.2
_PAUSE = 0.002


class Offer(NamedTuple):
    """Objects to be published. `since`: time.monotonic() when they came."""

    space: Space
    keys: bytes
    depth: npt.NDArray[np.int64]
    since: float


class Sharing:
    """Thread safe."""

    def __init__(self, parts: Parts, tier: PeerTier, getter: Getter, putter: Putter) -> None:
        self._parts, self._tier, self._getter, self._putter = parts, tier, getter, putter
        self._policy = tier.settings.publish
        self._seen = Seen(1 << 18)
        self._writes: set[int] = set()
        self._changed = threading.Condition()
        self._arrivals: deque[Arrival] = deque()
        self._offers: deque[Offer] = deque()
        self._waiting = self._keeping = 0
        self._closed = False
        tier.keep = self.keep
        self._thread = threading.Thread(target=self._run, name="tutti-share", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def keep(self, arrival: Arrival) -> bool:
        """Store what arrived here too; its memory is given back then. False: there is too much already."""
        with self._changed:
            size = arrival.load.span.size
            if self._closed or self._keeping + size > self._tier.memory.size // 4:
                self._tier.count("keep", dropped=count(arrival.keys))
                return False
            self._keeping += size
            self._arrivals.append(arrival)
            self._changed.notify_all()
        return True

    def put(self, space: Space, keys: bytes, depths: npt.NDArray[np.int64], new: Flags) -> None:
        """SGLang offered these; `new` ((n,)) are those that were not stored before."""
        self._writes.add(space.id)
        if self._policy == "all":
            which = np.flatnonzero(new)
            self._offer(space, some(keys, which), depths[which])
        elif self._policy == "second":
            self._second(space, keys, depths)

    def used(self, space: Space, keys: bytes) -> None:
        """These were read from the drives. Of replicas only the writer shares them: the others never put."""
        if keys and self._policy == "second" and space.id in self._writes:
            self._second(space, keys, np.zeros(count(keys), dtype=np.int64))

    def close(self, deadline: float) -> bool:
        """Do no more; False when what is under way does not end. What waits is lost to the fleet, not to this
        store."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def drain(self, deadline: float) -> bool:
        """Wait until nothing waits to be kept or published; False at the deadline."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._keeping, max(0.0, deadline - time.monotonic())
            )

    def _second(self, space: Space, keys: bytes, depth: npt.NDArray[np.int64]) -> None:
        with self._changed:
            which = np.flatnonzero(self._seen.again(keys))
        self._offer(space, some(keys, which), depth[which])

    def _offer(self, space: Space, keys: bytes, depth: npt.NDArray[np.int64]) -> None:
        if not len(depth) or self._tier.wire(space) is None:
            return
        with self._changed:
            if self._closed or self._waiting + len(depth) > MOST_KEYS or not self._tier.serves:
                self._tier.count("publish", dropped=len(depth))
                return
            self._offers.append(Offer(space, keys, depth, time.monotonic()))
            self._waiting += len(depth)
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._step()
            except Exception:  # noqa: BLE001 - the thread must live
                self._parts.metrics.add("tutti_call_errors", call="share")
                self._parts.reporter.failed("sharing with the fleet")
                time.sleep(0.1)

    def _step(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._arrivals or self._offers, _IDLE)
            arrival = self._arrivals.popleft() if self._arrivals else None
            offer = self._offers[0] if self._offers and not arrival else None
        if self._closed:
            return
        if arrival:
            self._keep(arrival)
        elif offer and not self._parts.window.calm(offer.since):
            time.sleep(_PAUSE)
        elif offer:
            with self._changed:
                self._offers.popleft()
            self._publish(offer)

    def _keep(self, arrival: Arrival) -> None:
        size = arrival.load.span.size
        try:
            wire = self._tier.wire(arrival.space)
            if wire:
                rows, now = wire.rows(arrival.base), time.monotonic()
                done, _ = self._putter.store(arrival.space, arrival.keys, rows, now, arrival.depth.astype(np.int64))
                kept = int(done.sum())
                self._tier.count("keep", stored=kept, dropped=len(done) - kept)
        finally:
            self._tier.memory.give(arrival.load.span)
            with self._changed:
                self._keeping -= size
                self._changed.notify_all()

    def _publish(self, offer: Offer) -> None:
        """Piece by piece; what the fleet has already is left out."""
        wire = self._tier.wire(offer.space)
        step = max(1, self._tier.memory.size // 8 // wire.stride) if wire else 1
        for at in range(0, len(offer.depth), step):
            which = np.arange(at, min(at + step, len(offer.depth)))
            try:
                if wire and self._tier.serves and not self._closed:
                    self._publish_some(offer._replace(keys=some(offer.keys, which), depth=offer.depth[which]))
                else:
                    self._tier.count("publish", dropped=len(which))
            finally:
                with self._changed:
                    self._waiting -= len(which)
                    self._changed.notify_all()

    def _publish_some(self, offer: Offer) -> None:
        tier, wire = self._tier, self._tier.wire(offer.space)
        assert wire
        until = time.monotonic() + tier.settings.timeout
        states = tier.link.ask("exists", wire.names(offer.keys), until)
        if states is None:
            tier.count("publish", failed=len(offer.depth))
            return
        tier.count("publish", exists=states.count(State.DONE))
        new = np.flatnonzero(np.array(states) == State.ABSENT)
        span = tier.memory.take(max(1, len(new)) * wire.stride, until, spare=tier.memory.size // 2)
        if span is None:
            tier.count("publish", dropped=len(new))
            return
        load = Load.of(span, len(new), wire.stride, wire.size)
        self._send(offer._replace(keys=some(offer.keys, new), depth=offer.depth[new]), load)

    def _send(self, offer: Offer, load: Load) -> None:
        """Read into the load's memory, and let the fleet fetch it from there."""
        tier, wire = self._tier, self._tier.wire(offer.space)
        assert wire
        call = None
        try:
            rows = wire.rows(tier.base(load))
            good = self._getter.fetch(offer.space, offer.keys, rows, (time.monotonic() + READ_SECONDS, IoClass.PRELOAD))
            which = np.flatnonzero(good)
            tier.count("publish", gone=len(good) - len(which))
            if not len(which):
                return
            keys = some(offer.keys, which)
            load = load._replace(offsets=[load.offsets[each] for each in which.tolist()])
            wire.seal(tier.base(load), keys, self._depth(offer.space, keys, offer.depth[which]))
            call = tier.link.begin("put", wire.names(keys), time.monotonic() + tier.settings.timeout, load)
            self._book(offer.space, len(which), tier.link.end(call).states if call else None)
        finally:
            if call is None or not call.abandoned:
                tier.memory.give(load.span)

    def _book(self, space: Space, objects: int, states: list[int] | None) -> None:
        states = [State.FAILED] * objects if states is None else states
        stored = states.count(State.DONE)
        exists, failed = states.count(State.EXISTS), states.count(State.FAILED)
        self._tier.count("publish", stored=stored, exists=exists, failed=failed)
        self._parts.metrics.add("tutti_bytes", stored * space.payload, op="send")
        if failed == 0:
            self._tier.link.breaker.worked(moved=True)

    def _depth(self, space: Space, keys: bytes, otherwise: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """What the index says, where it knows the object already."""
        sight = look(self._parts, space, keys)
        return np.where(sight.recorded, sight.records["depth"], otherwise).astype(np.uint32)
