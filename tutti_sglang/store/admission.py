"""Which pages are worth a write: all, or those seen a second time, as long as the day's budget of each drive lasts."""

import datetime
import threading

import numpy as np
import numpy.typing as npt

from tutti_sglang.config import Config
from tutti_sglang.store.index import Index
from tutti_sglang.store.keys import KEY_SIZE

SEEN_MAX = 1 << 20
"""Keys that are remembered at most: 8 MiB, touched as it fills."""

_MIX = np.random.default_rng(5).integers(1 << 62, 1 << 63, (KEY_SIZE // 8, 2), np.uint64) * np.uint64(2) + np.uint64(1)
"""Odd: two keys that differ in a single word never have the same hash."""

Mask = npt.NDArray[np.bool_]
"""(n,) one per key."""


class Seen:
    """Which keys were offered before: a table of fingerprints, where a new key takes the place of an older one with the
    same hash. It forgets, and takes one key for another once in 2⁶⁴. Not thread safe."""

    def __init__(self, size: int = SEEN_MAX) -> None:
        """`size`: a power of two, 2 at least."""
        assert size > 1
        assert size & (size - 1) == 0
        self._marks = np.zeros(size, dtype=np.uint64)
        self._shift = np.uint64(65 - size.bit_length())

    def again(self, keys: bytes) -> Mask:
        """True where the key was offered before; it is remembered where it was not, and forgotten where it was."""
        words = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_SIZE // 8)
        hashes = (words[:, :, None] * _MIX).sum(axis=1, dtype=np.uint64)
        places = hashes[:, 0] >> self._shift
        marks = hashes[:, 1] | np.uint64(1)
        known = self._marks[places] == marks
        self._marks[places] = np.where(known, np.uint64(0), marks)
        return np.asarray(known)


class Admission:
    """Decides in memory, for SGLang's threads; `flush` compares notes with the other processes. Thread safe."""

    def __init__(self, config: Config, index: Index) -> None:
        self._index = index
        self._budget = config.daily_write_budget
        self._seen = Seen() if config.write_admission == "second" else None
        self._lock = threading.Lock()
        self._today: dict[int, int] = {}
        self._unsaid: dict[int, int] = {}

    def admit(self, keys: bytes) -> Mask:
        """Which of these new pages to write."""
        with self._lock:
            known = np.ones(len(keys) // KEY_SIZE, dtype=np.bool_) if self._seen is None else self._seen.again(keys)
            return np.zeros_like(known) if self._spent() else known

    def wrote(self, nbytes: npt.NDArray[np.uint64]) -> None:
        """Count the bytes (drives,) that the drives were asked to write, whatever became of them: they wore."""
        with self._lock:
            for drive in np.flatnonzero(nbytes).tolist():
                self._unsaid[drive] = self._unsaid.get(drive, 0) + int(nbytes[drive])

    def flush(self) -> None:
        """Add to the store's count, and learn what all processes wrote today. StoreError, then it is added later."""
        with self._lock:
            unsaid = dict(self._unsaid)
        if not unsaid and not self._budget:
            return
        today = self._index.count_written(day(), unsaid)
        with self._lock:
            self._today = today
            for drive, nbytes in unsaid.items():
                self._unsaid[drive] -= nbytes

    def _spent(self) -> bool:
        if not self._budget:
            return False
        drives = self._today.keys() | self._unsaid.keys()
        return any(self._today.get(drive, 0) + self._unsaid.get(drive, 0) >= self._budget for drive in drives)


def day(now: datetime.datetime | None = None) -> int:
    """The UTC day that a daily budget is for, as a number."""
    return (now or datetime.datetime.now(datetime.UTC)).toordinal()
