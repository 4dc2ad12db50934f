"""Which pages are worth a write: all, or those seen a second time; and how many bytes a day the drives may take."""

import datetime

import numpy as np
import numpy.typing as npt

from tutti_sglang.store.index import KEY_SIZE

SEEN_MAX = 1 << 20
"""Keys that are remembered at most: 8 MiB, touched as it fills."""


class Seen:
    """Which keys were offered before: a table of fingerprints, where a new key takes the place of an older one with the
    same hash. It forgets, and takes one key for another once in 2⁶⁴. Not thread safe."""

    def __init__(self, size: int = SEEN_MAX) -> None:
        """`size`: a power of two."""
        assert size & (size - 1) == 0
        self._marks = np.zeros(size, dtype=np.uint64)

    def again(self, keys: bytes) -> npt.NDArray[np.bool_]:
        """(n,) True where the key was offered before; it is remembered where it was not, and forgotten where it was."""
        words = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_SIZE // 8)
        places = words[:, 0] & np.uint64(len(self._marks) - 1)
        marks = words[:, 1] | np.uint64(1)
        known = self._marks[places] == marks
        self._marks[places] = np.where(known, np.uint64(0), marks)
        return np.asarray(known)


def day(now: datetime.datetime | None = None) -> int:
    """The UTC day that a daily budget is for, as a number."""
    return (now or datetime.datetime.now(datetime.UTC)).toordinal()
