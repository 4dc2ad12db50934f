"""A put: skip what is there, copy the rest into staging, and leave it to the writer."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum, memory
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.staging import Extent
from tutti_sglang.memory import Addresses
from tutti_sglang.store.accepted import Parcel
from tutti_sglang.store.keys import some, split
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.sight import Flags, spot
from tutti_sglang.store.space import Space

PARCEL_BYTES = 8 << 20
"""About what is copied into staging as one: it goes back as one."""

Which = npt.NDArray[np.int64]


PARCELS = 8
"""How many are copied in one call."""


class _Offer(NamedTuple):
    """Objects `todo` of those that were offered; `depths`: (n,) of each in its prefix."""

    space: Space
    names: list[bytes]
    rows: Addresses
    todo: Which
    depths: Which

    def first(self, count: int) -> Addresses:
        """(count, T) the rows of the first of them."""
        return self.rows if count == len(self.rows) else self.rows[self.todo[:count]]

    def parcel(self, which: Which, rows: Addresses, sums: Sums, extent: Extent) -> Parcel:
        """Some of them, as they lie in staging."""
        names = [self.names[each] for each in which.tolist()]
        return Parcel(self.space.id, names, rows, sums, self.depths[which].astype(np.uint32), extent)


class Putter:
    """Thread safe."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._thread = threading.local()
        self._share: Callable[[Space, bytes, Which, Flags], None] = lambda *_: None

    def join(self, share: Callable[[Space, bytes, Which, Flags], None]) -> None:
        """Who shares objects is told from now on of keys, depths, and which objects are new."""
        self._share = share

    def put(self, space: Space, keys: bytes, rows: Addresses, deadline: float, depth: int) -> Flags:
        """(n,) whether the object is stored or accepted. `depth`: of the first key in its prefix."""
        depths = np.arange(depth, depth + len(rows))
        done, new = self.store(space, keys, rows, deadline, depths)
        self._thread.accepted = getattr(self._thread, "accepted", 0) + int(new.sum()) * space.payload
        self._share(space, keys, depths, new)
        return done

    def take_accepted(self) -> int:
        """Payload bytes of the objects that this thread's puts accepted since it last asked."""
        found: int = getattr(self._thread, "accepted", 0)
        self._thread.accepted = 0
        return found

    def store(self, space: Space, keys: bytes, rows: Addresses, deadline: float, depths: Which) -> tuple[Flags, Flags]:
        """The same without telling anybody; and (n,) which objects were accepted now. `depths`: (n,) of each key."""
        names = split(keys)
        new = np.zeros(len(names), dtype=np.bool_)
        done = self._parts.accepted.contains(space.id, names)
        sight = spot(self._parts, space, keys, lately=True)
        done |= sight.claimed
        self._parts.metrics.add("tutti_put_objects", int(done.sum()), outcome="exists")
        self._parts.hits.hit(space, sight.slots[sight.claimed])
        done |= self._declined(keys, done)
        serving = any(drive.writes.in_service for drive in self._parts.drives.values())
        todo = np.flatnonzero(~done) if serving else np.empty(0, dtype=np.int64)
        while len(todo):
            offer = _Offer(space, names, rows, todo, depths)
            parcels, which = self._pack(offer, deadline)
            if not parcels:
                break
            # What is recorded and cannot be read now makes way, but only for a copy that is really there.
            stale = which[sight.recorded[which]]
            self._parts.doubts.condemn(space.id, [names[each] for each in stale.tolist()], sight.slots[stale])
            self._parts.accepted.add(parcels)
            done[which] = new[which] = True
            todo = todo[len(which) :]
        self._parts.metrics.add("tutti_put_objects", int((~done).sum()), outcome="refused")
        return done, new

    def _declined(self, keys: bytes, done: Flags) -> Flags:
        """(n,) which of the new pages are not worth a write: SGLang is told that all is well, or it would stop
        there."""
        declined = np.zeros_like(done)
        new = np.flatnonzero(~done)
        declined[new] = ~self._parts.admission.admit(some(keys, new))
        self._parts.metrics.add("tutti_put_objects", int(declined.sum()), outcome="declined")
        return declined

    def _pack(self, offer: _Offer, deadline: float) -> tuple[list[Parcel], Which]:
        """The first of the objects in staging, and which they are: as many as there is room for and in one copy, since
        beside a busy Python thread each call costs milliseconds. None of them when staging stays full until the
        deadline."""
        extents = self._extents(offer, deadline)
        space, counts = offer.space, [len(which) for _, which in extents]
        packed = offer.todo[: sum(counts)]
        if not extents:
            return [], packed
        try:
            places = [space.places(len(which)) + np.uint64(extent.address) for extent, which in extents]
            copied = self._copy(space, np.concatenate(places), offer.first(len(packed)))
            sums = np.split(copied, np.cumsum(counts)[:-1])
        except BaseException:
            for extent, _ in extents:
                self._parts.accepted.refund(extent)
            raise
        self._parts.metrics.add("tutti_put_objects", len(packed), outcome="accepted")
        parts = zip(extents, places, sums, strict=True)
        return [offer.parcel(which, rows, part, extent) for (extent, which), rows, part in parts], packed

    def _extents(self, offer: _Offer, deadline: float) -> list[tuple[Extent, Which]]:
        """Staging for a parcel each, and what goes there; only the first is waited for."""
        step = max(1, min(PARCEL_BYTES, self._parts.staging.size // 16) // offer.space.object_size)
        found: list[tuple[Extent, Which]] = []
        for start in range(0, min(len(offer.todo), PARCELS * step), step):
            which = offer.todo[start : start + step]
            extent = self._parts.accepted.room(len(which) * offer.space.object_size, 0.0 if found else deadline)
            if extent is None:
                break
            found.append((extent, which))
        return found

    def _copy(self, space: Space, target: Addresses, rows: Addresses) -> Sums:
        if self._parts.verifying:
            return checksum.copy_and_sum(target, rows, space.sizes)
        memory.copy_rows(target, rows, space.sizes)
        return np.zeros(rows.shape, dtype=np.uint64)
