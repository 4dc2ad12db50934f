"""Batches of keys: n × 32 bytes in one string, and the ways to take them apart."""

import numpy as np
import numpy.typing as npt

from tutti_sglang.store.index import KEY_SIZE


def count(keys: bytes) -> int:
    """n."""
    assert len(keys) % KEY_SIZE == 0
    return len(keys) // KEY_SIZE


def split(keys: bytes) -> list[bytes]:
    """One by one."""
    return [keys[at : at + KEY_SIZE] for at in range(0, len(keys), KEY_SIZE)]


def some(keys: bytes, which: npt.NDArray[np.int64]) -> bytes:
    """Those keys only."""
    return np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_SIZE)[which].tobytes()
