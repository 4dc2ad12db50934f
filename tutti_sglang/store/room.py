"""Slots for what is about to be written: from this process's lease, else from a new segment, else by eviction."""

import contextlib
import threading
import time

import numpy as np
import numpy.typing as npt

from tutti_sglang.errors import StoreError
from tutti_sglang.store.evictor import Evictor
from tutti_sglang.store.growth import Growth
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.slots import Ranges, SlotLease, Slots, ranges_of, segments_in, segments_of
from tutti_sglang.store.space import Space

LEASE_BYTES, LEASE_SHARE = 512 << 20, 32
"""One lease is at most this large, and this part of the store, unless one batch needs more: what a process holds, the
others lack."""

SETTLE_SECONDS = 1.0
"""How long to wait for readers to leave evicted slots."""

IDLE_SECONDS = 5.0
"""A lease that was not used for so long goes back."""

NONE: Slots = np.empty(0, dtype=np.int64)
_POLL = 0.002


class Room:
    """Used by the writer thread, but for `give_back`."""

    def __init__(self, parts: Parts, growth: Growth, evictor: Evictor) -> None:
        self._parts = parts
        self._growth = growth
        self._evictor = evictor
        self._lease_bytes = min(LEASE_BYTES, parts.capacity // LEASE_SHARE)
        self._leases: dict[int, SlotLease] = {}
        self._oldest = 0  # `_everybody_reached` some time ago: it only grows, and finding out takes a while
        self._scarce = False
        self._last_take = 0.0
        self._lock = threading.Lock()
        self._unwanted: list[Slots] = []

    def take(self, space: Space, count: int, taken: Slots = NONE) -> Slots:
        """(≤ count,) slots, those already `taken` among them, that belong to this process and can be written to; fewer
        when the store is full and readers do not let go. StoreError, then the lease has what it had."""
        lease = self._leases.setdefault(space.id, SlotLease())
        self._last_take = time.monotonic()
        given = taken
        try:
            taken = np.concatenate([taken, self._take_writable(lease, count - len(taken))])
            coming = 0  # slots that were evicted and are not here yet: readers have to leave them first
            patience = time.monotonic() + SETTLE_SECONDS
            while (missing := count - len(taken)) > 0 and time.monotonic() < patience:
                if not self._lease(space, lease, missing) and not self._growth.add(space):
                    if coming >= missing:
                        time.sleep(_POLL)
                        continue
                    keep = segments_in(taken)
                    freed = self._evictor.make_room(space, missing - coming, keep)
                    if not freed:
                        break
                    coming += freed
                more = self._take_writable(lease, missing)
                taken = np.concatenate([taken, more])
                coming = max(0, coming - len(more))
                patience = time.monotonic() + SETTLE_SECONDS
        except BaseException:
            lease.add(ranges_of(np.setdiff1d(taken, given)))
            raise
        return taken

    def give_back(self, slots: Slots) -> None:
        """Slots that were taken and hold nothing. What the index does not take now is kept for `settle`."""
        if len(slots):
            with self._lock:
                self._unwanted.append(slots)
        with contextlib.suppress(StoreError):  # counted there, and tried again twice a second
            self.settle()

    def settle(self) -> None:
        """Hand unwanted slots to the index. StoreError."""
        with self._lock:
            if self._unwanted:
                self._parts.index.give_back(self._parts.owners.uuid, np.concatenate(self._unwanted))
                self._unwanted.clear()

    def rest(self) -> None:
        """Give leases back that nobody uses now. StoreError."""
        if time.monotonic() > self._last_take + IDLE_SECONDS:
            self.leave()

    def leave(self) -> None:
        """Give all leases back. StoreError."""
        for lease in self._leases.values():
            self.give_back(lease.take_all())
        self.settle()

    def relieve(self) -> None:
        """A file system is full although the space was ours (thin provisioning, copy on write): give some back.
        StoreError."""
        rows = [row.id for row in self._parts.segments.rows()]
        if rows:
            self._growth.drop(min(rows))

    def _lease(self, space: Space, lease: SlotLease, missing: int) -> bool:
        want = max(missing, self._lease_bytes // space.object_size)
        if self._scarce:
            self._oldest = self._everybody_reached()
        granted = self._granted(space, want)
        if not len(granted) and not self._scarce:  # what readers have left since then is free too
            self._oldest = self._everybody_reached()
            granted = self._granted(space, want)
        self._scarce = int(granted[:, 1].sum()) < want
        if len(granted):
            lease.add(granted)
        return bool(len(granted))

    def _everybody_reached(self) -> int:
        """The epoch that every reader has reached."""
        return self._parts.owners.oldest_epoch(self._parts.index.epoch(), self._parts.config.grace_seconds)

    def _granted(self, space: Space, want: int) -> Ranges:
        unwritable = self._parts.segments.unwritable(space.id)
        return self._parts.index.lease(self._parts.owners.uuid, space.id, want, self._oldest, unwritable)

    def _take_writable(self, lease: SlotLease, count: int) -> Slots:
        """Segments may have been dropped, and drives have failed, since the slots were leased."""
        slots = lease.take(count)
        segments = segments_of(slots)
        try:
            bad = [each for each in np.unique(segments).tolist() if not self._parts.segments.writable(each)]
        except BaseException:
            lease.add(ranges_of(slots))
            raise
        writable: npt.NDArray[np.bool_] = ~np.isin(segments, bad)
        self.give_back(slots[~writable])
        return slots[writable]
