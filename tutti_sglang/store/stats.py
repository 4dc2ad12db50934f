"""Figures of an open store that cost nothing to tell."""

from typing import NamedTuple

from tutti_sglang.store.allocation import Usage
from tutti_sglang.store.parts import Parts


class StoreStats(NamedTuple):
    """Of the whole store: bytes of segments and what they may grow to, objects and free slots as of the last half
    second. Of this process: accepted objects, bytes of staging they fill, drives in service."""

    segment_bytes: int
    capacity: int
    objects: int
    free_slots: int
    accepted: int
    accepted_bytes: int
    drives: int
    drives_in_service: int

    @classmethod
    def of(cls, parts: Parts, usage: Usage) -> "StoreStats":
        """What they are now; `usage`: as it was counted last."""
        return cls(
            segment_bytes=sum(parts.segments.used().values()),
            capacity=parts.capacity,
            objects=usage.used,
            free_slots=usage.free + usage.settling,
            accepted=len(parts.accepted),
            accepted_bytes=parts.accepted.size,
            drives=len(parts.drives),
            drives_in_service=sum(each.serves for each in parts.drives.values()),
        )
