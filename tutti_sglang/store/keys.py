"""Batches of keys: n × 32 bytes in one string, and the ways to take them apart."""

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum
from tutti_sglang.kernels import native

KEY_SIZE = 32
"""Bytes of a key: SGLang's chained SHA-256 of a page."""


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


def marks(namespace: int, keys: bytes) -> checksum.Sums:
    """(n,) XXH3-64 of namespace and key: the roots in the index are XORed with it. A record that a bad disk or a bug
    put under another key, or under the same key of another namespace, has no bytes that fit."""
    if library := native.library():
        found = np.empty(count(keys), dtype=np.uint64)
        library.tutti_marks(namespace, keys, len(found), found.ctypes.data)
        return found
    table = np.empty((len(keys) // KEY_SIZE, 1 + KEY_SIZE // 8), dtype="<u8")
    table[:, 0] = namespace
    table[:, 1:] = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_SIZE // 8)
    return checksum.roots(table)
