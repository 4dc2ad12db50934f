"""What the index says about keys, and what of it can be believed here and now."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.memory import zeros
from tutti_sglang.store.index import RECORD_DTYPE, Records
from tutti_sglang.store.keys import KEY_SIZE, some, split
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.slots import NO_SLOT, Slots, segments_in, segments_of
from tutti_sglang.store.space import Space

Flags = npt.NDArray[np.bool_]
"""(n,) one per key."""


class Sight(NamedTuple):
    """(n,) each. `recorded`: the index has it; `readable`: and all drives of its segment serve; `claimed`: and nothing
    speaks against promising it."""

    records: Records
    recorded: Flags
    readable: Flags
    claimed: Flags

    @property
    def slots(self) -> Slots:
        """(n,)"""
        return np.asarray(self.records["slot"].astype(np.int64))

    def some(self, which: npt.NDArray[np.int64] | slice) -> "Sight":
        """Those keys only."""
        return Sight(self.records[which], self.recorded[which], self.readable[which], self.claimed[which])


def look(parts: Parts, space: Space, keys: bytes) -> Sight:
    """Ask the index, for who reads the objects. Never raises: what cannot be found out is not there. A record that says
    nothing is removed."""
    trusted = _trusted(parts, space, keys)
    found = parts.index_drive.lookup(space.id, keys)
    spoiled = np.flatnonzero(found.damaged != NO_SLOT)
    if len(spoiled):
        parts.doubts.condemn(space.id, split(some(keys, spoiled)), found.damaged[spoiled])
    return _judge(parts, found.records, trusted)


def spot(parts: Parts, space: Space, keys: bytes, *, lately: bool = False) -> Sight:
    """The same for who only asks what is there: `records` have nothing but slots, and a get may know better. `lately`:
    as of Index.locate."""
    trusted = _trusted(parts, space, keys)
    records = zeros(len(keys) // KEY_SIZE, RECORD_DTYPE)
    records["slot"] = parts.index_drive.locate(space.id, keys, lately=lately)
    return _judge(parts, records, trusted)


def _trusted(parts: Parts, space: Space, keys: bytes) -> Flags | bool:
    """To be asked before the index: what is settled between the two is then neither in doubt nor recorded, and not the
    other way round."""
    return parts.doubts.trusted(space.id, split(keys)) if parts.doubts.any else True


def _judge(parts: Parts, records: Records, trusted: Flags | bool) -> Sight:
    recorded = records["slot"] != NO_SLOT
    readable = recorded.copy()
    slots = records["slot"].astype(np.int64)
    for segment in segments_in(slots[recorded]):
        if not parts.segments.readable(segment):
            readable[segments_of(slots) == segment] = False
    return Sight(records, recorded, readable, readable & trusted)
