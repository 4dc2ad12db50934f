"""Figures of an open store that cost nothing to tell."""

from typing import NamedTuple


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
