"""A small store and its pages, for tests of the object store."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from tutti_sglang.config import Config
from tutti_sglang.engine.batch import Operation
from tutti_sglang.engine.system import SYSTEM, Iovecs, Place, Seam
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.memory import Region
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import Namespace, ObjectStore
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.testing.faults import FaultPlan, FaultySystem

TENSORS = (8192, 8192, 4096, 5000)
SLOTS = 32
"""Objects of TENSORS in a segment of 1 MiB on one drive: one group."""
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
    """One of as many as there are models."""
    return Namespace(model=model, weights="w", dtype="bfloat16", page_size=16, tensors=tensors, layers=(0, 2))


class Weather(Seam):
    """A seam whose faults come and go: `plan` is what is wrong now. `calls`: for segments; `stalled`: under way now."""

    def __init__(self) -> None:
        self.plan: FaultPlan | None = None
        self.calls = self.stalled = 0

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        self.calls += place.drive_offset >= MIB  # below lies the file that drives are tried with
        self.stalled += 1
        plan = self.plan
        try:
            return (FaultySystem(plan) if plan else SYSTEM).transfer(operation, place, iovecs)
        finally:
            self.stalled -= 1


def open_store(*drives: Path, seam: Seam = SYSTEM, **changes: Any) -> ObjectStore:
    """A store with counters of its own and an engine whose system calls go through `seam`."""
    settings = config(*drives, **changes)
    engine = ThreadsEngine(settings.segment_size, 4, settings.max_io, seam)
    return ObjectStore(settings, metrics=Metrics(CollectorRegistry()), engine=engine)


def close_good(store: ObjectStore) -> None:
    """Close a store in which nothing may be wrong, and in which nothing of ours may have raised."""
    assert store.drain(30)
    report = store.verify()
    assert report.good, report
    assert value(store, "tutti_call_errors") == 0
    assert store.close()


def value(store: ObjectStore, name: str, **labels: str) -> float:
    """A counter of this store."""
    return store._parts.metrics.value(name, **labels)


def soon(seconds: float = 8.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def eventually(condition: Any, seconds: float = 20.0) -> bool:
    """Whether the condition comes true."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(found)


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
        """No page has this content."""
        self.bytes[:] = 0xEE
        return self

    def holds(self, place: int, number: int) -> bool:
        """Whether page `place` has the content of `number`."""
        return bool((self.bytes[place] == content(number, self._size)).all())


def content(number: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of page `number`."""
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def put(store: ObjectStore, ns: int, *numbers: int, tensors: tuple[int, ...] = TENSORS, salt: int = 0) -> list[bool]:
    """Put the pages with these numbers; their contents are those of number + salt."""
    pages = Pages(len(numbers), tensors).fill(*(number + salt for number in numbers))
    return store.put(ns, keys(*numbers), pages.rows, soon()).tolist()


def store_pages(store: ObjectStore, ns: int, *numbers: int, tensors: tuple[int, ...] = TENSORS) -> None:
    """Put them and wait until they are on the drives."""
    assert all(put(store, ns, *numbers, tensors=tensors))
    assert store.drain(8)


def get(store: ObjectStore, ns: int, *numbers: int, tensors: tuple[int, ...] = TENSORS, salt: int = 0) -> list[bool]:
    """Get them; every page that is delivered is compared."""
    pages = Pages(len(numbers), tensors).wipe()
    found = store.get(ns, keys(*numbers), pages.rows, soon()).tolist()
    for place, number in enumerate(numbers):
        assert not found[place] or pages.holds(place, number + salt), f"wrong bytes for page {number}"
    return found


def lookup(store: ObjectStore, ns: int, *numbers: int) -> list[bool]:
    """Which of them the store claims to have."""
    return store.lookup(ns, keys(*numbers)).tolist()


def segment_files(drive: Path) -> list[Path]:
    """Oldest first."""
    return sorted((drive / "segments").glob("*.seg"))
