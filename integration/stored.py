"""A pool in the store: whole pages, or layers of them, between memory and the objects of its namespaces."""

from contextlib import AbstractContextManager
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch

from tutti_sglang.engine.batch import IoClass
from tutti_sglang.integration.calls import KEY_BYTES
from tutti_sglang.integration.pools import PoolView
from tutti_sglang.memory import Addresses
from tutti_sglang.store import ABSENT, Layers, ObjectStore, Places
from tutti_sglang.store.namespace import Namespace

Found = npt.NDArray[np.bool_]


class StoredPool:
    """`namespaces`: one for each page map of `view` (head groups, none of a logical pool); a page is there when all of
    its objects are."""

    def __init__(
        self, store: ObjectStore, view: PoolView, namespaces: tuple[Namespace, ...], share: bool = True
    ) -> None:
        """`share`: with the fleet, where there is one."""
        assert len(namespaces) == len(view.maps)
        self.view = view
        self.namespaces = namespaces
        self._store = store
        self._ids = [store.attach(namespace, share=share) for namespace in namespaces]
        for each in self._ids:
            store.warm(each)

    def lookup(self, keys: bytes) -> Found:
        """(n,) whether the page is stored, or accepted by this process."""
        return _all(len(keys) // KEY_BYTES, [self._store.lookup(each, keys) for each in self._ids])

    @property
    def shares(self) -> bool:
        """Whether there is a fleet to ask for what is not here."""
        return self._store.fleet is not None

    def locate(self, keys: bytes) -> Places:
        """(n,) where the page is: ABSENT, HERE, or PEER where a part of it is in the fleet, which is asked for what is
        not here. Not for the scheduler thread: that may take a tenth of a second."""
        places = [self._store.locate(each, keys) for each in self._ids]
        found = _all(len(keys) // KEY_BYTES, [each != ABSENT for each in places])
        return np.asarray(np.where(found, np.maximum.reduce(places) if places else 1, ABSENT), np.uint8)

    def get(self, keys: bytes, indices: torch.Tensor, deadline: float) -> Found:
        """Fill the pages at `indices` (token slots); (n,) whether it came. Rows are not touched after the return."""
        pages = self.view.numbers(indices, len(keys) // KEY_BYTES)
        got = [
            self._store.get(each, keys, page_map.rows(pages), deadline)
            for each, page_map in zip(self._ids, self.view.maps, strict=True)
        ]
        return _all(len(pages), got)

    def put(self, keys: bytes, indices: torch.Tensor, deadline: float, depth: int = 0) -> Found:
        """Offer the pages at `indices`; (n,) whether stored or accepted. Rows are not read after the return."""
        pages = self.view.numbers(indices, len(keys) // KEY_BYTES)
        done = [
            self._store.put(each, keys, page_map.rows(pages), deadline, depth=depth)
            for each, page_map in zip(self._ids, self.view.maps, strict=True)
        ]
        return _all(len(pages), done)

    def read(self, keys: bytes, rows: Addresses, deadline: float, klass: IoClass) -> Found:
        """Fill `rows` ((n, T) addresses of host memory); (n,) whether it came. For pools of one page map."""
        (namespace,) = self._ids
        return self._store.get(namespace, keys, rows, deadline, klass)

    def write(self, keys: bytes, rows: Addresses, deadline: float, depth: int) -> Found:
        """Offer the pages in `rows`; (n,) whether stored or accepted. For pools of one page map."""
        (namespace,) = self._ids
        return self._store.put(namespace, keys, rows, deadline, depth=depth)

    def layers(self, keys: bytes) -> AbstractContextManager[Layers]:
        """Read the pages by tensors. For pools of one page map."""
        (namespace,) = self._ids
        return self._store.layers(namespace, keys)

    def clear(self) -> int:
        """Remove the objects of these namespaces, of this process and of all others."""
        return sum(self._store.clear(each) for each in self._ids)


class CopiedPool(StoredPool):
    """A pool that gives out copies of its pages, no addresses: each page passes through memory of ours, by two calls of
    the pool. Slower, and only for pools that are not known by their buffers."""

    def get(self, keys: bytes, indices: torch.Tensor, deadline: float) -> Found:
        """See StoredPool.get."""
        pages = self.view.numbers(indices, len(keys) // KEY_BYTES)
        copies = [self.view.pool.get_dummy_flat_data_page() for _ in pages]
        got = self._store.get(self._ids[0], keys, _rows(copies), deadline)
        for page, copy in compress(zip(pages.tolist(), copies, strict=True), got.tolist()):
            self.view.pool.set_from_flat_data_page(page * self.view.page_size, copy)
        return got

    def put(self, keys: bytes, indices: torch.Tensor, deadline: float, depth: int = 0) -> Found:
        """See StoredPool.put."""
        pages = self.view.numbers(indices, len(keys) // KEY_BYTES)
        copies = [self.view.pool.get_data_page(page * self.view.page_size).contiguous() for page in pages.tolist()]
        return self._store.put(self._ids[0], keys, _rows(copies), deadline, depth=depth)


def stored_pool(
    store: ObjectStore, view: PoolView, namespaces: tuple[Namespace, ...], share: bool = True
) -> StoredPool:
    """By addresses where the view has them."""
    return (StoredPool if view.pool is None else CopiedPool)(store, view, namespaces, share)


def _rows(copies: list[torch.Tensor]) -> npt.NDArray[np.uint64]:
    return np.array([[copy.data_ptr()] for copy in copies], dtype=np.uint64).reshape(-1, 1)


def _all(count: int, parts: list[Found]) -> Found:
    """(count,) whether every part has it."""
    return np.asarray(np.logical_and.reduce(parts, axis=0)) if parts else np.ones(count, np.bool_)
