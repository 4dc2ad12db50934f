"""The last step of a put: sums to their file, data to the disk where asked for, records into the index. All or
nothing per object."""

import secrets
import threading
import time

import numpy as np
import numpy.typing as npt

from tutti_sglang.checksum import roots
from tutti_sglang.errors import StoreError
from tutti_sglang.memory import zeros
from tutti_sglang.store.accepted import Cargo
from tutti_sglang.store.index import RECORD_DTYPE, Records
from tutti_sglang.store.keys import marks
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.room import Room
from tutti_sglang.store.slots import NO_SLOT, Slots, numbers_of, segments_in, segments_of
from tutti_sglang.store.space import Space


class Publisher:
    """Used by the writer thread. `commit` is held while records go into the index: who clears a namespace holds it
    too."""

    def __init__(self, parts: Parts, room: Room) -> None:
        self.commit = threading.Lock()
        self._parts = parts
        self._room = room
        self._generation = secrets.randbits(63)

    def publish(self, space: Space, cargo: Cargo, slots: Slots) -> npt.NDArray[np.bool_]:
        """Publish objects whose bytes are on the drives. (n,) whether the object is in the index now, in the slot given
        or in another one. Slots that were not needed go back. StoreError, OSError: none was published."""
        mine = np.zeros(len(slots), dtype=np.bool_)
        try:
            self._write_sums(cargo, slots)
            self.clean()
            with self.commit:
                wanted = cargo.wanted()
                mine[wanted] = self._commit(space, cargo.some(np.flatnonzero(wanted)), slots[wanted])
            self._parts.pins.wrote(space.id, slots[mine])
        finally:
            self._room.give_back(slots[~mine])
        return mine | self._elsewhere(space, cargo, wanted & ~mine)

    def clean(self) -> None:
        """Delete from the index what could not be read, or makes way for a new copy. StoreError."""
        for namespace, (keys, slots) in self._parts.doubts.condemned().items():
            self._parts.index.delete(namespace, b"".join(keys), slots)
            self._parts.doubts.settled(namespace, keys)

    def _write_sums(self, cargo: Cargo, slots: Slots) -> None:
        segments = segments_in(slots)
        for segment in segments if self._parts.verifying else ():
            which = segments_of(slots) == segment
            self._parts.sums.write(segment, numbers_of(slots[which]), cargo.sums[which], self._parts.syncing)
        if self._parts.syncing:
            self._parts.segments.sync(segments)

    def _commit(self, space: Space, cargo: Cargo, slots: Slots) -> npt.NDArray[np.bool_]:
        if not len(slots):
            return np.zeros(0, dtype=np.bool_)
        arguments = (self._parts.owners.uuid, space.id, b"".join(cargo.keys), self._records(space, cargo, slots))
        try:
            return self._parts.index.publish(*arguments)
        except StoreError:  # most likely another process holds the write lock for long: once more
            return self._parts.index.publish(*arguments)

    def _records(self, space: Space, cargo: Cargo, slots: Slots) -> Records:
        records = zeros(len(slots), RECORD_DTYPE)
        self._generation += len(slots)
        records["slot"] = slots
        records["generation"] = np.arange(self._generation, self._generation + len(slots), dtype=np.uint64)
        records["depth"] = cargo.depth
        records["bytes"] = space.object_size
        records["created"] = int(time.time())
        if self._parts.verifying:
            records["root"] = roots(cargo.sums) ^ marks(space.id, b"".join(cargo.keys))
        return records

    def _elsewhere(self, space: Space, cargo: Cargo, asked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """(n,) which of those asked for somebody else has published."""
        there = np.zeros(len(asked), dtype=np.bool_)
        if asked.any():
            keys = b"".join(cargo.some(np.flatnonzero(asked)).keys)
            there[asked] = self._parts.index.lookup(space.id, keys).records["slot"] != NO_SLOT
        return there
