"""Giving back what nobody needs: namespaces that were not used for long, and segments that hold nothing."""

from typing import NamedTuple

from tutti_sglang.store.growth import Growth
from tutti_sglang.store.parts import Parts


class Collected(NamedTuple):
    """What went: namespaces that were emptied, their objects, segments, and the bytes of these on all drives."""

    namespaces: int
    objects: int
    segments: int
    segment_bytes: int


def collect(parts: Parts, growth: Growth, unused_for: float, namespace: int | None) -> Collected:
    """Empty each namespace (or only the one given) that had no hit and no write for `unused_for` seconds, then remove
    the files of empty segments, which the namespaces in use make again when they need them. StoreError."""
    chosen = [
        share.namespace
        for share in parts.index.shares({})
        if share.idle >= unused_for and namespace in (None, share.namespace)
    ]
    objects = sum(parts.index.clear(number) for number in chosen)
    while parts.index.purge():
        pass
    parts.segments.refresh()
    sizes = parts.segments.sizes()
    dropped = [number for number in parts.index.empty_segments() if growth.drop(number) is not None]
    return Collected(len(chosen), objects, len(dropped), sum(sizes.get(number, 0) for number in dropped))
