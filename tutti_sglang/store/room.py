"""Slots for what is about to be written: from this process's lease, else from a new segment, else by eviction."""

import threading
import time

import numpy as np

from tutti_sglang.store.growth import Growth
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.slots import SlotLease, Slots
from tutti_sglang.store.space import Space

LEASE_SLOTS, LEASE_BYTES = 256, 64 << 20
"""One lease is at most this large, unless one batch needs more: what a process holds, the others lack."""

SETTLE_SECONDS = 1.0
"""How long to wait for readers to leave evicted slots."""

_POLL = 0.002


class Room:
    """Used by the writer thread, but for `give_back`."""

    def __init__(self, parts: Parts, growth: Growth) -> None:
        self._parts = parts
        self._growth = growth
        self._leases: dict[int, SlotLease] = {}
        self._lock = threading.Lock()
        self._unwanted: list[Slots] = []

    def take(self, space: Space, count: int) -> Slots:
        """(≤ count,) slots that belong to this process; fewer when the store is full and readers do not let go.
        StoreError."""
        lease = self._leases.setdefault(space.id, SlotLease())
        deadline = time.monotonic() + SETTLE_SECONDS
        evicted = False
        while lease.remaining < count:
            missing = count - lease.remaining
            if self._lease(space, lease, missing) or self._growth.add(space):
                continue
            if not evicted:
                evicted = self._evict(space, missing) > 0
                continue
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL)
        return lease.take(count)

    def give_back(self, slots: Slots) -> None:
        """Slots that were taken and hold nothing. What the index cannot take now is kept for `settle`."""
        if len(slots):
            with self._lock:
                self._unwanted.append(slots)
        self.settle()

    def settle(self) -> None:
        """Hand unwanted slots to the index."""
        with self._lock:
            if not self._unwanted:
                return
            slots = np.concatenate(self._unwanted)
            self._parts.index.give_back(self._parts.owners.uuid, slots)
            self._unwanted.clear()

    def leave(self) -> None:
        """Give all leases back. StoreError."""
        for lease in self._leases.values():
            self.give_back(lease.take_all())

    def oldest_epoch(self) -> int:
        """Up to which epoch freed slots may be used again."""
        return self._parts.owners.oldest_epoch(self._parts.index.epoch(), self._parts.config.grace_seconds)

    def _lease(self, space: Space, lease: SlotLease, missing: int) -> bool:
        want = max(missing, min(LEASE_SLOTS, LEASE_BYTES // space.object_size))
        granted = self._parts.index.lease(self._parts.owners.uuid, space.id, want, self.oldest_epoch())
        lease.add(granted)
        return bool(len(granted))

    def relieve(self, space: Space) -> None:
        """A file system is full although the space was ours: give some back to it."""
        self._evict_segment(space)

    def _evict(self, space: Space, missing: int) -> int:
        """Make about `missing` slots free in the namespace; how many objects went."""
        return self._evict_segment(space)

    def _evict_segment(self, space: Space) -> int:
        """The oldest segment goes, of this namespace if it has any."""
        rows = self._parts.segments.rows()
        mine = [row.id for row in rows if row.namespace == space.id] or [row.id for row in rows]
        gone = self._growth.drop(min(mine)) if mine else 0
        self._parts.metrics.add("tutti_evicted_objects", gone)
        return gone
