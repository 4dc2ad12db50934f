"""Objects that come and go as tensors: SGLang's generic get and set, for callers without a host pool's rows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tutti_sglang.integration.calls import key_bytes
from tutti_sglang.integration.stored import Found
from tutti_sglang.store import ObjectStore
from tutti_sglang.store.namespace import Namespace


class Shape(NamedTuple):
    """What a flat object is told apart by: bytes and dtype."""

    nbytes: int
    dtype: torch.dtype


class FlatObjects:
    """`namespace_of(nbytes, dtype)` names the objects of one shape; a namespace is attached at its first use."""

    def __init__(self, store: ObjectStore, namespace_of: Callable[[int, str], Namespace]) -> None:
        self._store = store
        self._namespace_of = namespace_of
        self._ids: dict[Shape, int] = {}

    def open(self, shape: Shape) -> int:
        """The store's id of the namespace."""
        if shape not in self._ids:
            namespace = self._namespace_of(shape.nbytes, str(shape.dtype).removeprefix("torch."))
            self._ids[shape] = self._store.attach(namespace, share=False)
        return self._ids[shape]

    def lookup(self, keys: bytes) -> Found:
        """(n,) whether an object of any opened shape is there."""
        found = [self._store.lookup(each, keys) for each in list(self._ids.values())]
        return np.logical_or.reduce(found) if found else np.zeros(len(keys) // 32, np.bool_)

    def put(self, keys: Sequence[str], values: Sequence[Any], deadline: float) -> list[bool]:
        """One bool for each key; values that are no tensors, or empty, are not stored."""
        done = [False] * len(keys)
        for shape, places in _by_shape(values).items():
            packed = [_packed(values[place]) for place in places]
            rows = _rows(packed)
            stored = self._store.put(self.open(shape), key_bytes([keys[p] for p in places]), rows, deadline)
            for place, each in zip(places, stored.tolist(), strict=True):
                done[place] = each
        return done

    def get(self, keys: Sequence[str], targets: Sequence[Any], deadline: float) -> list[torch.Tensor | None]:
        """The tensors, in `targets` where one is given, else new ones of one dimension; None for a miss."""
        values: list[torch.Tensor | None] = [None] * len(keys)
        for shape, places in _by_shape(targets).items():
            whole = [_packed(targets[place], copy=False) for place in places]
            got = self._store.get(self.open(shape), key_bytes([keys[p] for p in places]), _rows(whole), deadline)
            for place, packed, came in zip(places, whole, got.tolist(), strict=True):
                if came:
                    target = targets[place]
                    values[place] = target if packed.data_ptr() == target.data_ptr() else target.copy_(packed)
        for place, target in enumerate(targets):
            if target is None:
                values[place] = self._find(keys[place], deadline)
        return values

    def clear(self) -> int:
        """Remove the objects of all opened shapes."""
        return sum(self._store.clear(each) for each in list(self._ids.values()))

    def _find(self, key: str, deadline: float) -> torch.Tensor | None:
        binary = key_bytes([key])
        for shape, namespace in list(self._ids.items()):
            value = torch.empty(shape.nbytes // shape.dtype.itemsize, dtype=shape.dtype)
            if self._store.get(namespace, binary, _rows([value]), deadline)[0]:
                return value
        return None


def _by_shape(tensors: Sequence[Any]) -> dict[Shape, list[int]]:
    places: dict[Shape, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            places.setdefault(Shape(tensor.numel() * tensor.element_size(), tensor.dtype), []).append(place)
    return places


def _packed(tensor: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
    """`tensor` if its bytes lie in one run of host memory, else a copy (or an empty one of its shape) that does."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    if copy:
        return tensor.detach().cpu().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _rows(tensors: Sequence[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([[tensor.data_ptr()] for tensor in tensors], dtype=np.uint64)
