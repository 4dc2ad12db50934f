"""The file `clock`: a byte per slot that counts hits since the hand passed. Hits need no write to the index.

Many processes add to it without a lock: two that write the same stretch at once lose a hit or two, and nothing else. It
is read and written by calls, never memory-mapped: a file cut off by somebody is a short read then, not a SIGBUS.
"""

import contextlib
import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti_sglang.store.eviction import HITS_MAX, Hits
from tutti_sglang.store.slots import Slots, numbers_of, segments_in, segments_of

Places = npt.NDArray[np.int64]
"""(n,) offsets in the file."""

_STRETCH = 4096
"""Touched bytes that lie no further apart are written together."""
_PENDING_MAX = 1 << 20
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def places_of(slots: Slots, start_of: Callable[[int], int | None]) -> Places:
    """Where the bytes of slots lie; `start_of`: the first byte of a segment, None where it is not known, and then its
    slots are left out."""
    segments = segments_of(slots)
    places = [np.empty(0, dtype=np.int64)]
    for segment in segments_in(slots):
        start = start_of(segment)
        if start is not None:
            places.append(numbers_of(slots[segments == segment]) + start)
    return np.concatenate(places)


class Clock:
    """Thread safe. A file that cannot be read has no hits; one that cannot be written keeps its old ones: eviction is
    then a little less clever."""

    def __init__(self, directory: int, name: str = "clock") -> None:
        """`directory`: descriptor. OSError where the file cannot be opened or made."""
        self._fd = os.open(name, _FLAGS, 0o600, dir_fd=directory)
        self._lock = threading.Lock()
        self._pending: list[Places] = []
        self._count = 0

    def touch(self, places: Places) -> None:
        """Remember hits until `flush`. No I/O: for SGLang's threads."""
        with self._lock:
            if self._count < _PENDING_MAX:
                self._pending.append(places)
                self._count += len(places)

    def flush(self) -> None:
        """Write what was remembered; a call per stretch of touched slots. For a background thread."""
        with self._lock:
            pending, self._pending, self._count = self._pending, [], 0
        if not pending:
            return
        places, counts = np.unique(np.concatenate(pending), return_counts=True)
        for piece in np.split(np.arange(len(places)), np.flatnonzero(np.diff(places) > _STRETCH) + 1):
            start = int(places[piece[0]])
            hits = self.read(start, int(places[piece[-1]]) - start + 1).astype(np.int64)
            hits[places[piece] - start] += counts[piece]
            self.write(start, np.minimum(hits, HITS_MAX).astype(np.uint8))

    def read(self, start: int, count: int) -> Hits:
        """(count,) bytes from `start`; zeros beyond the end of the file."""
        hits = np.zeros(count, dtype=np.uint8)
        with contextlib.suppress(OSError):
            os.preadv(self._fd, [hits.data], start)
        return hits

    def write(self, start: int, hits: Hits) -> None:
        """Set bytes."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, hits.tobytes(), start)

    def close(self) -> None:
        """Write what was remembered. Idempotent."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1
