"""The index: which object lies in which slot. One SQLite database for all processes of a store."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.errors import StoreError
from tutti_sglang.metrics import Metrics
from tutti_sglang.store.database import json_list
from tutti_sglang.store.registry import Registry
from tutti_sglang.store.slots import NO_SLOT, Slots

KEY_SIZE = 32
"""Bytes of a key: SGLang's chained SHA-256 of a page."""

RECORD_DTYPE = np.dtype(
    [
        ("slot", "<u8"),  # NO_SLOT: there is no such object
        ("generation", "<u8"),  # the writer's choice; (slot, generation) never comes twice
        ("depth", "<u4"),  # pages before this one in its prefix
        ("bytes", "<u4"),  # of the object on disk
        ("created", "<u8"),  # Unix seconds
        ("root", "<u8"),  # checksum of the object's row of tensor checksums
    ]
)
assert RECORD_DTYPE.itemsize == 40

Records = npt.NDArray[np.void]
"""(n,) RECORD_DTYPE."""

_ID_SIZE = 4 + KEY_SIZE
_BODY_DTYPE = np.dtype(RECORD_DTYPE.descr[1:])
"""The column `record`: the slot is a column of its own."""
_BODY = _BODY_DTYPE.itemsize

# One row for a whole batch: slots as a list, the records joined and written as hex once, which is cheaper than each.
_LOOKUP = f"""
    select (select value from epoch),
           group_concat(ifnull(o.slot, {NO_SLOT})),
           hex(group_concat(ifnull(o.record, x'{"00" * _BODY}'), ''))
    from json_each(?2) as n left join objects as o on o.id = substr(?1, n.key * {_ID_SIZE} + 1, {_ID_SIZE})
"""
_PUBLISH = f"""
    insert or ignore into objects (id, slot, record)
    select substr(?1, n.key * {_ID_SIZE} + 1, {_ID_SIZE}), n.value, substr(?2, n.key * {_BODY} + 1, {_BODY})
    from json_each(?3) as n cross join leased on leased.slot = n.value where leased.owner = ?4
"""
_MATCH = f"""
    select group_concat(n.key) from json_each(?2) as n cross join objects as o
    on o.id = substr(?1, n.key * {_ID_SIZE} + 1, {_ID_SIZE}) and o.slot = n.value
"""
_DELETE = f"""
    delete from objects where id in
    (select substr(?1, n.value * {_ID_SIZE} + 1, {_ID_SIZE}) from json_each(?2) as n)
"""
_OCCUPANTS = """
    select hex(group_concat(id, '')), group_concat(slot), hex(group_concat(record, ''))
    from (select * from objects where slot >= ? and slot < ? order by slot)
"""
_SORTED_FROM = 1024
"""Keys from which sorting them pays."""
_CLEAR_PIECE = 4096
_CLEAR = f"""
    delete from objects where id in (select id from objects where id >= ? and id < ? limit {_CLEAR_PIECE})
"""


class Lookup(NamedTuple):
    """Records as of one moment, and the store's epoch at that moment."""

    records: Records
    epoch: int


class Occupants(NamedTuple):
    """Objects of a stretch of slots: (n, 32) keys and (n,) records, by slot."""

    keys: npt.NDArray[np.uint8]
    records: Records


class Index(Registry):
    """Key → record, for all namespaces, and who holds which slot. Opening looks at no object. Thread safe, not
    fork safe."""

    def __init__(self, path: Path, metrics: Metrics | None = None) -> None:
        super().__init__(path, metrics)
        self._last_epoch = 0

    @property
    def last_epoch(self) -> int:
        """The newest epoch that a lookup of this process has seen: what a reader publishes before it looks up."""
        return self._last_epoch

    def epoch(self) -> int:
        """The store's epoch now. StoreError."""
        with self._read("epoch") as connection:
            return int(connection.execute("select value from epoch").fetchone()[0])

    def lookup(self, namespace: int, keys: bytes) -> Lookup:
        """The records of n keys of 32 bytes, as of one moment; `slot` = NO_SLOT where there is none. Never waits for a
        writer. A statement that fails is counted, and finds nothing."""
        count = len(keys) // KEY_SIZE
        order = _tree_order(keys) if count >= _SORTED_FROM else np.arange(count)
        values = (_ids(namespace, keys, order), "[" + ",".join("0" * count) + "]")
        try:
            with self._read("lookup") as connection:
                epoch, slots, body = connection.execute(_LOOKUP, values).fetchone()
        except StoreError:
            return Lookup(_absent(count), self._last_epoch)
        self._last_epoch = max(self._last_epoch, epoch)
        records = np.empty(count, dtype=RECORD_DTYPE)
        records[order] = _records(slots, body)
        return Lookup(records, epoch)

    def publish(self, owner: str, namespace: int, keys: bytes, records: Records) -> npt.NDArray[np.bool_]:
        """(n,) True where this record is now the index's: the key had none, and `owner` holds the slot's lease. The
        other slots stay leased, for `give_back`. All or nothing per object. StoreError, then nothing was published."""
        slots = records["slot"].astype(np.int64)
        body = np.ascontiguousarray(records).view(np.uint8).reshape(-1, RECORD_DTYPE.itemsize)[:, 8:].tobytes()
        values = (_ids(namespace, keys), body, json_list(slots), owner)
        with self._write("publish") as connection:
            if connection.execute(_PUBLISH, values).rowcount == len(records):
                return np.ones(len(records), dtype=np.bool_)
        return np.asarray(self.lookup(namespace, keys).records == records)

    def delete(self, namespace: int, keys: bytes, slots: Slots) -> npt.NDArray[np.bool_]:
        """(n,) True where the key still had this slot: the object is gone, its slot settles. StoreError."""
        ids = _ids(namespace, keys)
        gone = np.zeros(len(slots), dtype=np.bool_)
        with self._transaction("delete") as connection:
            (text,) = connection.execute(_MATCH, (ids, json_list(slots))).fetchone()
            if text:
                connection.execute(_DELETE, (ids, f"[{text}]"))
                gone[np.fromstring(text, dtype=np.int64, sep=",")] = True
        return gone

    def occupants(self, first: int, last: int) -> Occupants:
        """The objects in the slots `first` to `last` - 1. StoreError."""
        with self._read("occupants") as connection:
            ids, slots, body = connection.execute(_OCCUPANTS, (first, last)).fetchone()
        rows = np.frombuffer(bytes.fromhex(ids or ""), dtype=np.uint8).reshape(-1, _ID_SIZE)
        return Occupants(rows[:, _ID_SIZE - KEY_SIZE :], _records(slots, body))

    def clear(self, namespace: int) -> int:
        """Delete all objects of a namespace, in pieces that let other writers in; how many they were. StoreError."""
        low, high = namespace.to_bytes(4, "big"), (namespace + 1).to_bytes(4, "big")
        total = 0
        while True:
            with self._write("clear") as connection:
                gone = connection.execute(_CLEAR, (low, high)).rowcount
            total += gone
            if gone < _CLEAR_PIECE:
                return total


def _ids(namespace: int, keys: bytes, order: npt.NDArray[np.int64] | None = None) -> bytes:
    """The n keys of 32 bytes, in this order, each behind its namespace."""
    assert len(keys) % KEY_SIZE == 0
    rows = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_SIZE)
    ids = np.empty((len(rows), _ID_SIZE), dtype=np.uint8)
    ids[:, :4] = np.frombuffer(namespace.to_bytes(4, "big"), dtype=np.uint8)
    ids[:, 4:] = rows if order is None else rows[order]
    return ids.tobytes()


def _tree_order(keys: bytes) -> npt.NDArray[np.int64]:
    """(n,) which key comes next in the B-tree, as far as its first 8 bytes tell: neighbours share pages."""
    return np.asarray(np.argsort(np.frombuffer(keys, dtype=">u8")[:: KEY_SIZE // 8]))


def _records(slots: str | None, body: str | None) -> Records:
    """What SQLite said: None where it was about nothing."""
    packed = np.frombuffer(bytes.fromhex(body or ""), dtype=_BODY_DTYPE)
    records = np.empty(len(packed), dtype=RECORD_DTYPE)
    records["slot"] = np.fromstring(slots or "", dtype=np.int64, sep=",")
    for name in _BODY_DTYPE.names or ():
        records[name] = packed[name]
    return records


def _absent(count: int) -> Records:
    records = np.zeros(count, dtype=RECORD_DTYPE)
    records["slot"] = NO_SLOT
    return records
