"""A small store and its pages, for tests of the object store."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from tutti_sglang.config import Config
from tutti_sglang.engine.system import SYSTEM, Seam
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.memory import Region
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import Namespace, ObjectStore
from tutti_sglang.store.index import KEY_SIZE

TENSORS = (8192, 8192, 4096, 5000)
MIB = 1 << 20


def config(*drives: Path, **changes: Any) -> Config:
    """A store of a few MiB."""
    settings: dict[str, Any] = {
        "storage_dirs": tuple(map(str, drives)),
        "segment_size": MIB,
        "max_size": 8 * MIB,
        "min_free_space": 0,
        "staging_size": 8 * MIB,
        "engine": "threads",
    }
    return Config(**(settings | changes))


def namespace(model: str = "m", tensors: tuple[int, ...] = TENSORS) -> Namespace:
    return Namespace(model=model, weights="w", dtype="bfloat16", page_size=16, tensors=tensors, layers=(0, 2))


def open_store(*drives: Path, seam: Seam = SYSTEM, **changes: Any) -> ObjectStore:
    """A store with counters of its own and an engine whose system calls go through `seam`."""
    settings = config(*drives, **changes)
    engine = ThreadsEngine(settings.segment_size, 4, settings.max_io, seam)
    return ObjectStore(settings, metrics=Metrics(CollectorRegistry()), engine=engine)


def soon(seconds: float = 8.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def keys(*numbers: int) -> bytes:
    """A key for each number."""
    return b"".join(number.to_bytes(KEY_SIZE, "big") for number in numbers)


class Pages:
    """Room for `count` objects in memory; each page's content follows from its number."""

    def __init__(self, count: int, tensors: tuple[int, ...] = TENSORS) -> None:
        self.tensors = tensors
        self._size = sum(tensors)
        self._region = Region(max(1, count * self._size))
        self.count = count
        places = np.cumsum([0, *tensors[:-1]])
        self.rows = (self._region.address + np.arange(count)[:, None] * self._size + places).astype(np.uint64)

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """(count, object bytes)"""
        return self._region.view[: self.count * self._size].reshape(self.count, self._size)

    def fill(self, *numbers: int) -> "Pages":
        """Page i gets the content that goes with numbers[i]."""
        for place, number in enumerate(numbers):
            self.bytes[place] = content(number, self._size)
        return self

    def wipe(self) -> "Pages":
        self.bytes[:] = 0xEE
        return self

    def hold(self, place: int, number: int) -> bool:
        """Whether page `place` has the content of `number`."""
        return bool((self.bytes[place] == content(number, self._size)).all())


def content(number: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of page `number`."""
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def put(store: ObjectStore, ns: int, *numbers: int, tensors: tuple[int, ...] = TENSORS) -> npt.NDArray[np.bool_]:
    """Put the pages with these numbers."""
    pages = Pages(len(numbers), tensors).fill(*numbers)
    return store.put(ns, keys(*numbers), pages.rows, soon())


def get(store: ObjectStore, ns: int, *numbers: int, tensors: tuple[int, ...] = TENSORS) -> list[bool]:
    """Get them; every page that is delivered is compared."""
    pages = Pages(len(numbers), tensors).wipe()
    found = store.get(ns, keys(*numbers), pages.rows, soon()).tolist()
    for place, number in enumerate(numbers):
        assert not found[place] or pages.hold(place, number), f"wrong bytes for page {number}"
    return found
