"""Does the index add up? Each slot is in exactly one state, and each object lies in a segment of its namespace."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.store import schema
from tutti_sglang.store.index import RECORD_DTYPE, Records
from tutti_sglang.store.slots import SEGMENT_SHIFT, SLOTS_MAX

BATCH = 1024

_SLOTS = {
    "object": "select slot from objects",
    "leased": "select slot from leased",
    "settling": "select slot from settling",
}


class Audit(NamedTuple):
    """Segments with slots in no state (`lost`) or in two (`double`): segment → how many; objects in no segment of their
    namespace (`stray`)."""

    lost: dict[int, int]
    double: dict[int, int]
    stray: int


class Batch(NamedTuple):
    """Objects of one namespace, in the order of their keys."""

    namespace: int
    keys: bytes
    records: Records


def audit(path: Path) -> Audit:
    """Look at every slot of the index at `path`, as of one moment. FAILURES of a database."""
    with snapshot(path) as connection:
        rows = connection.execute(
            "select id, slots, count, bits from segments left join free on segment = id"
        ).fetchall()
        states = {name: _numbers(connection, query) for name, query in _SLOTS.items()}
        (stray,) = connection.execute(
            f"select count(*) from objects left join segments on segments.id = slot >> {SEGMENT_SHIFT} "
            f"where segments.id is null or (slot & {SLOTS_MAX}) >= slots "
            "or hex(substr(objects.id, 1, 4)) != printf('%08X', segments.namespace)"
        ).fetchone()
    lost: dict[int, int] = {}
    double: dict[int, int] = {}
    for segment, slots, count, bits in rows:
        times = np.zeros(slots, dtype=np.int64)
        if bits is not None:
            free = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=slots, bitorder="little")
            times += free
            double[segment] = abs(int(free.sum()) - count)  # the count beside the bits is one of the two that are wrong
        for each in states.values():
            mine = each[(each >> SEGMENT_SHIFT) == segment] & SLOTS_MAX
            np.add.at(times, mine[mine < slots], 1)
        lost[segment] = int((times == 0).sum())
        double[segment] = double.get(segment, 0) + int((times > 1).sum())
    return Audit({k: v for k, v in lost.items() if v}, {k: v for k, v in double.items() if v}, stray)


def objects(path: Path, namespace: int | None) -> Iterator[Batch]:
    """All objects of a namespace, or of all, BATCH at a time, each as of its own moment. FAILURES of a database."""
    last = b"" if namespace is None else namespace.to_bytes(4, "big")
    while True:
        with snapshot(path) as connection:
            rows = connection.execute(
                f"select id, slot, record from objects where id > ? order by id limit {BATCH}", (last,)
            ).fetchall()
        rows = [row for row in rows if row[0][:4] == rows[0][0][:4]]
        if not rows or (namespace is not None and int.from_bytes(rows[0][0][:4], "big") != namespace):
            return
        last = rows[-1][0]
        records = np.empty(len(rows), dtype=RECORD_DTYPE)
        records["slot"] = [row[1] for row in rows]
        body = np.frombuffer(b"".join(row[2] for row in rows), dtype=np.dtype(RECORD_DTYPE.descr[1:]))
        for name, *_ in RECORD_DTYPE.descr[1:]:
            records[name] = body[name]
        yield Batch(int.from_bytes(last[:4], "big"), b"".join(row[0][4:] for row in rows), records)


@contextlib.contextmanager
def snapshot(path: Path) -> Iterator[sqlite3.Connection]:
    """The index as of one moment, only to read. FAILURES of a database."""
    connection = schema.connect(path, schema.READ_TIMEOUT)
    try:
        connection.execute("pragma query_only = on")
        connection.execute("begin")
        yield connection
    finally:
        connection.close()


def _numbers(connection: sqlite3.Connection, query: str) -> npt.NDArray[np.int64]:
    return np.array([row[0] for row in connection.execute(query)], dtype=np.int64)
