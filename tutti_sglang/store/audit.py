"""Does the index add up? Each slot is in exactly one state, and each object lies in a segment of its namespace."""

import contextlib
import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.store import schema
from tutti_sglang.store.index import RECORD_DTYPE, Records
from tutti_sglang.store.keys import KEY_SIZE, marks, some
from tutti_sglang.store.slots import SEGMENT_SHIFT, SLOTS_MAX, Slots

BATCH = 1024

_BODY = np.dtype(RECORD_DTYPE.descr[1:])
_ID_SIZE = 4 + KEY_SIZE
_NOBODY = -1
_Row = tuple[int, int, bytes, bytes]

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
    """Objects of one namespace, by slot."""

    namespace: int
    keys: bytes
    records: Records


class Found(NamedTuple):
    """A stretch of the table of objects. `broken`: slots of rows that no lookup can find or understand."""

    batches: list[Batch]
    broken: Slots


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


def objects(path: Path, namespaces: Collection[int], only: int | None) -> Iterator[Found]:
    """All objects of the store's `namespaces`, or of `only` one, about BATCH at a time, each as of its own moment.
    Broken rows are nobody's and come in any case. FAILURES of a database."""
    last = -1 << 63
    while True:
        with snapshot(path) as connection:
            rows = connection.execute(
                "select slot, mark, cast(id as blob), cast(record as blob) from objects where slot > ? "
                f"order by slot limit {BATCH}",
                (last,),
            ).fetchall()
        if not rows:
            return
        last = rows[-1][0]
        by_namespace: dict[int, list[_Row]] = {}
        for row in rows:
            whole = row[2] and row[3] and len(row[2]) == _ID_SIZE and len(row[3]) == _BODY.itemsize
            number = int.from_bytes(row[2][:4], "big") if whole else _NOBODY
            by_namespace.setdefault(number if number in namespaces else _NOBODY, []).append(row)
        broken = [row[0] for row in by_namespace.pop(_NOBODY, [])]
        batches = []
        for number, mine in by_namespace.items():
            batch, lost = _batch(number, mine)
            broken += lost
            if only in (None, number):
                batches.append(batch)
        yield Found(batches, np.array(broken, dtype=np.int64))


def _batch(namespace: int, rows: list[_Row]) -> tuple[Batch, list[int]]:
    """The rows that lookups find, and the slots of the others."""
    keys = b"".join(row[2][4:] for row in rows)
    records = np.empty(len(rows), dtype=RECORD_DTYPE)
    records["slot"] = slots = np.array([row[0] for row in rows], dtype=np.int64)
    body = np.frombuffer(b"".join(row[3] for row in rows), dtype=_BODY)
    for name, *_ in RECORD_DTYPE.descr[1:]:
        records[name] = body[name]
    good = (marks(namespace, keys).view(np.int64) == [row[1] for row in rows]) & (records["generation"] != 0)
    which = np.flatnonzero(good)
    return Batch(namespace, some(keys, which), records[which]), slots[~good].tolist()


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
