"""What this process's own evictions spare: what its lookups have just claimed, until the get had time to come, and what
it wrote last.

A claim is a promise that SGLang plans a request by. Nothing holds other processes back: what they evict in between is
an honest miss, told page by page. Nor is a slot kept from its next owner: that is what reading epochs are for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti_sglang.store.slots import Slots

PIN_SECONDS = 5.0
"""How long a claim is kept."""
LATEST_MAX = 1 << 10
"""Slots written last that are remembered, of each namespace."""
PINS_MAX = 1 << 17
"""Slots that are remembered at most: the oldest claims are given up."""


class Pins:
    """Thread safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._claims: deque[tuple[float, Slots]] = deque()
        self._count = 0
        self._written: dict[int, Slots] = {}

    def wrote(self, namespace: int, slots: Slots) -> None:
        """They hold new objects."""
        with self._lock:
            before = self._written.get(namespace, slots[:0])
            self._written[namespace] = np.concatenate([before, slots])[-LATEST_MAX:]

    def latest(self, namespace: int, most: int) -> Slots:
        """The slots written last, `most` at most."""
        with self._lock:
            written = self._written.get(namespace, np.empty(0, dtype=np.int64))
            return written[max(0, len(written) - most) :]

    def pin(self, slots: Slots) -> None:
        """Spare these for PIN_SECONDS from now."""
        with self._lock:
            self._claims.append((self._clock() + PIN_SECONDS, slots))
            self._count += len(slots)
            self._forget()

    def pinned(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """(n,) which of the slots are spared."""
        with self._lock:
            self._forget()
            claims = [claimed for _, claimed in self._claims]
        return np.isin(slots, np.concatenate(claims)) if claims else np.zeros(len(slots), dtype=np.bool_)

    def _forget(self) -> None:
        now = self._clock()
        while self._claims and (self._claims[0][0] <= now or self._count > PINS_MAX):
            self._count -= len(self._claims.popleft()[1])
