"""Makes room in a full store: an object of the same namespace goes, or a segment of another one."""

from collections.abc import Collection

import numpy as np

from tutti_sglang.store.allocation import SegmentRow
from tutti_sglang.store.eviction import donor, surplus
from tutti_sglang.store.growth import Growth
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.slots import slot_ids
from tutti_sglang.store.space import Space
from tutti_sglang.store.sweeper import Sweeper

TRIM_MAX = 4096
"""Objects that go at once above the high watermark: others want to write to the index too."""


class Evictor:
    """For the writer's thread."""

    def __init__(self, parts: Parts, growth: Growth) -> None:
        self._parts = parts
        self._growth = growth
        self._sweeper = Sweeper(parts.index, parts.hits.clock, parts.pins)

    def make_room(self, space: Space, missing: int, keep: Collection[int]) -> int:
        """Make room for about `missing` objects of the namespace; how many slots become free, now or when their readers
        have left them; 0 while the store may have room, and somebody holds its lock: in a full one objects need no lock
        to go, however long a process is stopped with it. Segments to `keep` are about to be written to. StoreError."""
        if self._growth.locked_out and not self._growth.full(space):
            return 0
        segments = self._parts.segments
        rows = [row for row in segments.rows() if segments.writable(row.id)]
        others = [row for row in rows if row.id not in keep and not segments.being_written(row.id)]
        given = self._take_segment(space, others)
        return given or self._count(self._sweeper.make_room(space.id, missing, rows))

    def trim(self) -> None:
        """Keep slots free above the high watermark of each namespace of this process, where no segment can be added.
        StoreError."""
        config = self._parts.config
        for space in list(self._parts.spaces.values()):
            too_many = surplus(self._parts.index.usage(space.id), config.low_watermark, config.high_watermark)
            if too_many and self._growth.full(space):
                rows = [row for row in self._parts.segments.rows() if self._parts.segments.writable(row.id)]
                self._count(self._sweeper.make_room(space.id, min(too_many, TRIM_MAX), rows, spare=True))

    def _take_segment(self, space: Space, rows: list[SegmentRow]) -> int:
        """Drop the coldest segment of the namespace that has to give one, if there is any; how many slots it had."""
        sizes = self._parts.segments.sizes()
        size: dict[int, int] = {}
        for row in self._parts.segments.rows():
            size[row.namespace] = size.get(row.namespace, 0) + sizes[row.id]
        giver = donor(self._parts.index.shares(size), space.id, max(sizes.values(), default=0))
        mine = [row for row in rows if row.namespace == giver]
        if not mine:
            return 0
        coldest = min(mine, key=self._warmth)
        gone = self._growth.drop(coldest.id)
        self._count(gone or 0)
        return 0 if gone is None else coldest.slots

    def _warmth(self, row: SegmentRow) -> tuple[bool, int, int]:
        """What is pinned goes last, then hits decide."""
        pinned = self._parts.pins.pinned(slot_ids(row.id, np.arange(row.slots))).any()
        return bool(pinned), int(self._parts.hits.clock.read(row.clock, row.slots).sum()), row.id

    def _count(self, gone: int) -> int:
        self._parts.metrics.add("tutti_evicted_objects", gone)
        return gone
