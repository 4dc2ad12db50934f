"""What lookups of this process have just claimed: its own evictions spare it until the get had time to come.

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
PINS_MAX = 1 << 17
"""Slots that are remembered at most: the oldest claims are given up."""


class Pins:
    """Thread safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._claims: deque[tuple[float, Slots]] = deque()
        self._count = 0

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
