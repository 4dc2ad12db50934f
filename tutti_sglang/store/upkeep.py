"""What a store does beside reading and writing, a little at a time, on the writer's thread."""

import time
from collections.abc import Callable

from tutti_sglang.errors import StoreError
from tutti_sglang.store.allocation import Usage
from tutti_sglang.store.growth import Growth
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.publisher import Publisher
from tutti_sglang.store.room import Room

SLOW_SECONDS = 5.0
"""How often what concerns other processes is looked at."""


class Upkeep:
    """`tick` is called about twice a second; each duty is tried each time, whatever became of the others."""

    def __init__(self, parts: Parts, room: Room, growth: Growth, publisher: Publisher) -> None:
        self._parts = parts
        self._room = room
        self._growth = growth
        self._publisher = publisher
        self._next_slow = time.monotonic() + SLOW_SECONDS
        self.usage = Usage(0, 0, 0, 0, 0)

    def tick(self) -> None:
        """Do what is due."""
        duties: list[Callable[[], object]] = [self._publisher.clean, self._room.settle, self.drop_lost, self.count]
        if time.monotonic() >= self._next_slow:
            self._next_slow = time.monotonic() + SLOW_SECONDS
            duties += [self.reclaim, self._parts.segments.refresh]
        for duty in duties:
            try:
                duty()
            except StoreError as error:
                self._parts.reporter.warn(f"upkeep {duty}", str(error))

    def drop_lost(self) -> None:
        """Segments whose files were deleted under us."""
        for number in list(self._parts.segments.lost):
            gone = self._growth.drop(number)
            self._parts.segments.lost.discard(number)
            self._parts.reporter.warn("lost segment", f"A segment file was deleted; {gone} objects went with it")

    def reclaim(self) -> int:
        """Free what dead owners held; how many slots."""
        owners, index = self._parts.owners, self._parts.index
        count = 0
        for name in set(owners.dead()) | (index.lessees() - set(owners.live())):
            count += index.reclaim(name)
            owners.remove(name)
        return count

    def count(self) -> None:
        """Slots by state, for `stats`."""
        self.usage = self._parts.index.usage()
