"""Objects of a namespace of their own, to measure a store with: random bytes in memory, written and read back."""

import time

import numpy as np

from tutti_sglang.engine.plan import object_addresses, tensor_addresses
from tutti_sglang.memory import Region
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.objects import ObjectStore

SECONDS = 60
"""How long one call may take."""


class Scratch:
    """`pages` objects in memory."""

    def __init__(self, store: ObjectStore, namespace: Namespace, pages: int) -> None:
        """StoreError, CapacityError."""
        self._store, self._number = store, store.attach(namespace)
        sizes = np.array(namespace.tensors, dtype=np.int64)
        size = int(sizes.sum())
        self._region = Region(pages * size)
        self._region.view[:] = np.random.default_rng(0).integers(256, size=len(self._region.view), dtype=np.uint8)
        self._rows = tensor_addresses(object_addresses(self._region.address, pages, size), sizes)

    def put(self, keys: bytes) -> bool:
        """Whether the store took all of them."""
        return bool(self._store.put(self._number, keys, self._rows_of(keys), time.monotonic() + SECONDS).all())

    def get(self, keys: bytes) -> bool:
        """Whether all of them came back, into the same memory."""
        return bool(self._store.get(self._number, keys, self._rows_of(keys), time.monotonic() + SECONDS).all())

    def clear(self) -> None:
        """Remove them from the store."""
        self._store.clear(self._number)

    def close(self) -> None:
        """Remove them, and give the memory back."""
        self.clear()
        self._region.close()

    def _rows_of(self, keys: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        return self._rows[: len(keys) // KEY_SIZE]
