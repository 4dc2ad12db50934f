"""A put: skip what is there, copy the rest into staging, and leave it to the writer."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum, memory
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.plan import object_addresses, tensor_addresses
from tutti_sglang.memory import Addresses
from tutti_sglang.store.accepted import Parcel
from tutti_sglang.store.keys import some, split
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.sight import Flags, spot
from tutti_sglang.store.space import Space

PARCEL_BYTES = 8 << 20
"""About what is copied into staging as one: it goes back as one."""

Which = npt.NDArray[np.int64]


class Putter:
    """Thread safe."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._share: Callable[[Space, bytes, Which, Flags], None] = lambda *_: None

    def join(self, share: Callable[[Space, bytes, Which, Flags], None]) -> None:
        """Who shares objects is told from now on of keys, depths, and which objects are new."""
        self._share = share

    def put(self, space: Space, keys: bytes, rows: Addresses, deadline: float, depth: int) -> Flags:
        """(n,) whether the object is stored or accepted. `depth`: of the first key in its prefix."""
        depths = np.arange(depth, depth + len(rows))
        done, new = self.store(space, keys, rows, deadline, depths)
        self._share(space, keys, depths, new)
        return done

    def store(self, space: Space, keys: bytes, rows: Addresses, deadline: float, depths: Which) -> tuple[Flags, Flags]:
        """The same without telling anybody; and (n,) which objects were accepted now. `depths`: (n,) of each key."""
        names = split(keys)
        new = np.zeros(len(names), dtype=np.bool_)
        done = self._parts.accepted.contains(space.id, names)
        sight = spot(self._parts, space, keys)
        done |= sight.claimed
        self._parts.metrics.add("tutti_put_objects", int(done.sum()), outcome="exists")
        self._parts.hits.hit(space, sight.slots[sight.claimed])
        done |= self._declined(keys, done)
        serving = any(drive.writes.in_service for drive in self._parts.drives.values())
        todo = np.flatnonzero(~done) if serving else np.empty(0, dtype=np.int64)
        step = max(1, min(PARCEL_BYTES, self._parts.staging.size // 16) // space.object_size)
        for start in range(0, len(todo), step):
            which = todo[start : start + step]
            parcel = self._pack(space, [names[each] for each in which.tolist()], rows[which], depths[which], deadline)
            if parcel is None:
                break
            # What is recorded and cannot be read now makes way, but only for a copy that is really there.
            stale = which[sight.recorded[which]]
            self._parts.doubts.condemn(space.id, [names[each] for each in stale.tolist()], sight.slots[stale])
            self._parts.accepted.add(parcel)
            done[which] = new[which] = True
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

    def _pack(self, space: Space, names: list[bytes], rows: Addresses, depth: Which, deadline: float) -> Parcel | None:
        """The objects in staging; None when it stays full until the deadline."""
        extent = self._parts.accepted.room(len(names) * space.object_size, deadline)
        if extent is None:
            return None
        try:
            base = object_addresses(extent.address, len(names), space.object_size)
            sums = self._copy(space, tensor_addresses(base, space.strides), rows)
        except BaseException:
            self._parts.accepted.refund(extent)
            raise
        self._parts.metrics.add("tutti_put_objects", len(names), outcome="accepted")
        return Parcel(space.id, names, base, sums, depth.astype(np.uint32), extent)

    def _copy(self, space: Space, target: Addresses, rows: Addresses) -> Sums:
        if self._parts.verifying:
            return checksum.copy_and_sum(target, rows, space.sizes)
        memory.copy_rows(target, rows, space.sizes)
        return np.zeros(rows.shape, dtype=np.uint64)
