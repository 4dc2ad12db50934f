"""A small index and its objects, for tests of what lies below the object store."""

import secrets
import sqlite3
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from tutti_sglang.metrics import Metrics
from tutti_sglang.store.index import RECORD_DTYPE, Index, Records
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.slots import Slots, slots_of

ROOT = Path(__file__).parents[2]
NAMESPACE = Namespace(model="m", weights="w", dtype="bfloat16", page_size=64, tensors=(4096,) * 4, layers=(0, 2))
OTHER = Namespace(model="other", weights="w", dtype="bfloat16", page_size=64, tensors=(4096,) * 4, layers=(0, 2))
GROUP, SLOTS = 4, 64
EVER = 1 << 62
"""An oldest epoch that every freed slot has passed."""


def open_index(path: Path) -> Index:
    return Index(path / "index.db", Metrics(CollectorRegistry()))


def new_records(slots: Slots) -> Records:
    records = np.zeros(len(slots), dtype=RECORD_DTYPE)
    records["slot"] = slots
    records["generation"] = secrets.randbits(64)
    records["depth"] = np.arange(len(slots))
    records["bytes"] = 1 << 20
    records["created"] = (1 << 63) + 5
    records["root"] = [secrets.randbits(64) for _ in slots]
    return records


def new_keys(count: int) -> bytes:
    return secrets.token_bytes(count * KEY_SIZE)


def stored(index: Index, space: int, count: int, owner: str = "me") -> tuple[bytes, Records]:
    slots = slots_of(index.lease(owner, space, count, EVER))[:count]
    keys, records = new_keys(count), new_records(slots)
    assert index.publish(owner, space, keys, records).all()
    return keys, records


def check(index: Index) -> None:
    """Each slot of each segment is free, leased, settling or holds one object."""
    raw = sqlite3.connect(index.path)
    states: list[int] = []
    for segment, slots, bits, count in raw.execute(
        "select id, slots, bits, count from segments join free on segment = id"
    ):
        free = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=slots))
        assert len(free) == count
        states += ((segment << 24) + free).tolist()
    for table in ("leased", "settling", "objects"):
        states += [slot for (slot,) in raw.execute(f"select slot from {table}")]
    every = [(i << 24) + n for i, slots in raw.execute("select id, slots from segments") for n in range(slots)]
    assert sorted(states) == every
    raw.close()
    usage = index.usage()
    assert usage.slots == len(every)
    assert usage.used == sum(index.usage(number).used for number in index.namespaces())
