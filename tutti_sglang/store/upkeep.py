"""What a store does beside reading and writing, a little at a time, on the writer's thread."""

import time
from collections.abc import Callable
from functools import partial

from tutti_sglang.errors import StoreError
from tutti_sglang.store.allocation import Usage
from tutti_sglang.store.directory import INDEX, identity
from tutti_sglang.store.evictor import Evictor
from tutti_sglang.store.growth import Growth
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.publisher import Publisher
from tutti_sglang.store.revival import Revival
from tutti_sglang.store.room import Room

SLOW_SECONDS = 2.0
"""How often what other processes did is looked at."""

PURGE_SECONDS = 0.1
"""Of each tick, for what was cleared."""

MIRROR_SECONDS = 0.1
"""Of each tick, for the table in memory while it is being loaded."""

SHRINK_SECONDS = 10.0
"""Time for all processes to close a dropped segment, so that its space shows as free before another one is dropped."""


class Upkeep:
    """`due` is asked about twice a second; each duty is tried each time, whatever became of the others."""

    def __init__(self, parts: Parts, room: Room, growth: Growth, publisher: Publisher, evictor: Evictor) -> None:
        self.usage = Usage(0, 0, 0, 0, 0)
        self._parts = parts
        self._room = room
        self._growth = growth
        self._publisher = publisher
        self._evictor = evictor
        self._revival = Revival(parts)
        self._index_file = identity(str(parts.config.index_path), INDEX)
        self._next_slow = self._next_shrink = time.monotonic()

    def due(self) -> list[Callable[[], None]]:
        """What is to be done now, in this order. None of it raises."""
        duties: list[Callable[[], object]] = [self._notice_deletion, self._revival.tick]
        if not self._parts.gone.is_set():
            duties += [self._publisher.clean, self._room.settle, self._room.rest, self._drop_lost, self._count]
            duties += [self._settle] if self.usage.settling else []
            duties += [self._purge, self._mirror]
            if time.monotonic() >= self._next_slow:
                self._next_slow = time.monotonic() + SLOW_SECONDS
                duties += [self.reclaim, self._parts.segments.refresh, self._make_space, self._evictor.trim]
                duties += [self._parts.hits.flush, self._parts.admission.flush]
        return [partial(self._do, duty) for duty in duties]

    def begin(self) -> None:
        """What dead owners held is free before anything is leased, unless the index cannot be written to now. The table
        in memory of a small store is there from the start."""
        for duty in (self.reclaim, self._parts.admission.flush, partial(self._parts.index.mirror, 0.0)):
            self._do(duty)

    def purge(self, until: float) -> None:
        """Free the room of what was cleared, whoever did it; the rest another time. StoreError."""
        began = False
        while time.monotonic() < until and self._parts.index.purge():
            if not began:
                self._parts.segments.refresh()  # nothing new must go to where it would not be seen
            began = True
        if began:
            self._parts.segments.refresh()

    def _purge(self) -> None:
        self.purge(time.monotonic() + PURGE_SECONDS)

    def _mirror(self) -> None:
        self._parts.index.mirror(time.monotonic() + MIRROR_SECONDS)

    def _do(self, duty: Callable[[], object]) -> None:
        try:
            duty()
        except (StoreError, OSError) as error:
            self._parts.reporter.warn(f"upkeep {type(error).__name__}", str(error))

    def reclaim(self) -> int:
        """Free what dead owners held; how many slots. StoreError, OSError."""
        owners, index = self._parts.owners, self._parts.index
        count = 0
        for name in (set(owners.dead()) | (index.lessees() - set(owners.live()))) - {owners.uuid}:
            count += index.reclaim(name)
            owners.remove(name)
        return count

    def _notice_deletion(self) -> None:
        """Whoever deletes the index of a running store gets a store that only misses; it stays so until it is opened
        again."""
        parts = self._parts
        if not parts.gone.is_set() and identity(str(parts.config.index_path), INDEX) != self._index_file:
            parts.gone.set()
            where = parts.config.index_path
            parts.reporter.warn("gone", f"The index in {where} was deleted: nothing is cached until a restart")

    def _drop_lost(self) -> None:
        """Segments whose files were deleted under us."""
        for number in list(self._parts.segments.lost):
            gone = self._growth.drop(number)
            self._parts.segments.lost.discard(number)
            self._parts.reporter.warn("lost segment", f"A segment's file was deleted; {gone} objects went with it")

    def _make_space(self) -> None:
        """Others need the disk: give a segment back when less than min_free_space is left."""
        if time.monotonic() >= self._next_shrink:
            gone = self._growth.yield_space()
            if gone is not None:
                self._next_shrink = time.monotonic() + SHRINK_SECONDS
                self._parts.reporter.warn("yield", f"A disk is nearly full: {gone} objects made way (min_free_space)")

    def _settle(self) -> None:
        """Evicted and cleared slots come free even if nobody asks for slots."""
        index = self._parts.index
        index.settle(self._parts.owners.oldest_epoch(index.epoch(), self._parts.config.grace_seconds))

    def _count(self) -> None:
        """Figures for `stats` and gauges."""
        self.usage = self._parts.index.usage()
        for ordinal, used in self._parts.segments.used().items():
            self._parts.metrics.set("tutti_segment_bytes", used, drive=str(ordinal))
