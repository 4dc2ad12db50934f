"""What is used: hits of slots and heat of namespaces, collected in memory and written in the background."""

import threading

from tutti_sglang.store.clock import Clock, places_of
from tutti_sglang.store.segments import Segments
from tutti_sglang.store.slots import Slots
from tutti_sglang.store.space import Space


class Hits:
    """Thread safe."""

    def __init__(self, clock: Clock, segments: Segments) -> None:
        self.clock = clock
        self._segments = segments
        self._index = segments.index
        self._lock = threading.Lock()
        self._heat: dict[int, int] = {}

    def hit(self, space: Space, slots: Slots) -> None:
        """Objects were read, or offered again. No I/O: for SGLang's threads."""
        if len(slots):
            self.clock.touch(places_of(slots, self._start_of))
            self._warm(space, len(slots) * space.object_size)

    def wrote(self, space: Space) -> None:
        """Somebody works with the namespace."""
        self._warm(space, 0)

    def flush(self) -> None:
        """Write what was collected. StoreError; the heat of that time is lost then."""
        self.clock.flush()
        with self._lock:
            heat, self._heat = self._heat, {}
        if heat:
            self._index.add_heat(heat)

    def _warm(self, space: Space, nbytes: int) -> None:
        with self._lock:
            self._heat[space.id] = self._heat.get(space.id, 0) + nbytes

    def _start_of(self, segment: int) -> int | None:
        found = self._segments.find(segment)
        return found.row.clock if found else None
