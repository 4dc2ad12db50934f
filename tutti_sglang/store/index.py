"""The index: which object lies in which slot. One SQLite database for all processes of a store."""

import time
from sqlite3 import Connection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.errors import StoreError
from tutti_sglang.memory import zeros
from tutti_sglang.store.allocation import ACTIVE, CLEARING, usage
from tutti_sglang.store.database import json_list, numbers
from tutti_sglang.store.keys import KEY_SIZE, marks
from tutti_sglang.store.mirror import NEWS, Look, Mirror, Moment, news_of
from tutti_sglang.store.slots import NO_SLOT, SEGMENT_SHIFT, Slots
from tutti_sglang.store.table import Marks

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

_MARK = 20
"""Digits of a mark, sign included, where many are one argument beside the slots `n`."""
_MARK_OF_N = f"cast(substr(?2, n.key * {_MARK} + 1, {_MARK}) as integer)"

# One row for a whole batch: slots as a list, the records joined and written as hex once, which is cheaper than each.
# What SQLite finds by its mark alone is compared with the whole id here; `locate` does without, and reads no row.
_MOMENT = f"(select value from epoch), (select group_concat(id) from segments where state = '{CLEARING}')"
_LOCATE = f"""
    select {_MOMENT}, group_concat(ifnull(o.slot, {NO_SLOT}))
    from json_each(?1) as n left join objects as o indexed by objects_by_mark on o.mark = n.value
"""
_BODIES = f"""
    hex(group_concat(iif(length(cast(o.record as blob)) = {_BODY} and o.id = substr(?2, n.key * {_ID_SIZE} + 1,
                         {_ID_SIZE}), o.record, x'{"00" * _BODY}'), ''))
"""
_LOOKUP = f"""
    select {_MOMENT}, group_concat(ifnull(o.slot, {NO_SLOT})), {_BODIES}
    from json_each(?1) as n left join objects as o on o.mark = n.value
"""
# The same for who has a table: what is news to it, and records by slot, where a run lies together.
_LOCATE_NEWS = f"select {_MOMENT}, {NEWS}"
_LOOKUP_SLOTS = (
    f"select {_MOMENT}, {NEWS}, {_BODIES} from json_each(?3) as n left join objects as o on o.slot = n.value"
)
_PUBLISH = f"""
    insert or ignore into objects (slot, mark, id, record)
    select n.value, {_MARK_OF_N}, substr(?1, n.key * {_ID_SIZE} + 1, {_ID_SIZE}),
           substr(?3, n.key * {_BODY} + 1, {_BODY})
    from json_each(?4) as n cross join leased on leased.slot = n.value where leased.owner = ?5
    and n.value >> {SEGMENT_SHIFT} not in (select id from segments where state = '{CLEARING}')
"""
_MATCH = f"""
    select group_concat(n.key) from json_each(?1) as n cross join objects as o
    on o.slot = n.value and o.mark = {_MARK_OF_N}
"""
_DELETE = "delete from objects where slot in (select value from json_each(?))"
_OCCUPANTS = f"""
    select hex(group_concat(id, '')), group_concat(slot),
           hex(group_concat(iif(length(cast(record as blob)) = {_BODY}, record, x'{"00" * _BODY}'), ''))
    from (select * from objects where slot >= ? and slot < ? and length(cast(id as blob)) = {_ID_SIZE} order by slot)
"""
_SORTED_FROM = 1024
"""Keys from which sorting them pays."""
_CLEAR = f"""
    update segments set state = '{CLEARING}' where namespace = ? and exists
    (select 1 from objects where slot >= segments.id << {SEGMENT_SHIFT} and slot < (segments.id + 1) << {SEGMENT_SHIFT})
"""
_PURGE_PIECE = 4096
_PURGE = f"""
    delete from objects where slot in
    (select slot from objects where slot >= ?1 << {SEGMENT_SHIFT} and slot < (?1 + 1) << {SEGMENT_SHIFT}
     limit {_PURGE_PIECE})
"""


class Lookup(NamedTuple):
    """Records as of one moment, and the store's epoch at that moment. `damaged`: (n,) the slot of a record that cannot
    be understood, and so is none; else NO_SLOT."""

    records: Records
    epoch: int
    damaged: Slots


class Occupants(NamedTuple):
    """Objects of a stretch of slots: (n, 32) keys and (n,) records, by slot."""

    keys: npt.NDArray[np.uint8]
    records: Records


class Index(Mirror):
    """Key → record, for all namespaces, and who holds which slot. Opening looks at no object. Thread safe, not
    fork safe."""

    _last_epoch = 0

    @property
    def last_epoch(self) -> int:
        """The newest epoch that a lookup of this process has seen: what a reader publishes before it looks up."""
        return self._last_epoch

    def epoch(self) -> int:
        """The store's epoch now. StoreError."""
        with self._read("epoch") as connection:
            return int(connection.execute("select value from epoch").fetchone()[0])

    def locate(self, namespace: int, keys: bytes, *, lately: bool = False) -> Slots:
        """(n,) the slots of n keys of 32 bytes, as of one moment; NO_SLOT where there is none. Another key is taken for
        one of them once in 2⁶⁴. Never waits for a writer. A statement that fails is counted, and finds nothing.
        `lately`: what other processes have changed in the last LATELY seconds does not matter."""
        wanted = marks(namespace, keys).view(np.int64)
        if (slots := self._remembered(wanted, lately)) is not None:
            return slots
        try:
            with self._read("lookup") as connection:
                moment, slots = self._locate_in_table(connection, wanted) or _locate(connection, wanted)
        except StoreError:
            return np.full(len(wanted), NO_SLOT)
        self._last_epoch = max(self._last_epoch, moment.epoch)
        return moment.in_sight(slots)

    def lookup(self, namespace: int, keys: bytes) -> Lookup:
        """The records of n keys; `slot` = NO_SLOT where there is none. Else as `locate`, and without its doubt."""
        wanted = marks(namespace, keys).view(np.int64)
        try:
            with self._read("lookup") as connection:
                found = self._lookup_by_table(connection, namespace, keys, wanted)
                moment, records = found or _lookup(connection, namespace, keys, wanted)
        except StoreError:
            return nothing(keys)
        self._last_epoch = max(self._last_epoch, moment.epoch)
        records["slot"] = moment.in_sight(records["slot"].astype(np.int64))
        spoiled = records["generation"] == 0
        damaged = np.where(spoiled, records["slot"].astype(np.int64), NO_SLOT)
        records[spoiled] = _absent(1)
        return Lookup(records, moment.epoch, damaged)

    def _locate_in_table(self, connection: Connection, wanted: Marks) -> tuple[Moment, Slots] | None:
        """None where the B-tree has to be asked."""
        if (table := self.table) is None:
            return None
        last, header, changes, now = table.last, self.state(), self._changes, time.monotonic()
        epoch, clearing, *news = connection.execute(_LOCATE_NEWS, (last,)).fetchone()
        slots = table.find(wanted, news_of(last, *news))
        if slots is None:
            return None
        moment = Moment(epoch, clearing)
        self._look = Look(moment, news[0], header, changes, now)
        return moment, slots

    def _lookup_by_table(
        self, connection: Connection, namespace: int, keys: bytes, wanted: Marks
    ) -> tuple[Moment, Records] | None:
        """The same, and where something moved just now or is damaged."""
        if (table := self.table) is None:
            return None
        last, slots = table.guess(wanted)
        order = _order(slots)
        values = (last, _ids(namespace, keys, order), json_list(slots[order]))
        epoch, clearing, *news, bodies = connection.execute(_LOOKUP_SLOTS, values).fetchone()
        records = np.empty(len(wanted), dtype=RECORD_DTYPE)
        records[order] = _records(slots[order], bodies)
        if news[0] != last:
            now = table.find(wanted, news_of(last, *news))
            if now is None or (now != slots).any():
                return None
        if ((records["generation"] == 0) & (slots != NO_SLOT)).any():  # damage that no change tells of
            self.table = None
            return None
        return Moment(epoch, clearing), records

    def publish(self, owner: str, namespace: int, keys: bytes, records: Records) -> npt.NDArray[np.bool_]:
        """(n,) True where this record is now the index's: the key had none, and `owner` holds the slot's lease, outside
        what is being cleared. The other slots stay leased, for `give_back`. All or nothing per object. StoreError, then
        nothing was published."""
        assert records["generation"].all()
        slots = records["slot"].astype(np.int64)
        body = np.ascontiguousarray(records).view(np.uint8).reshape(-1, RECORD_DTYPE.itemsize)[:, 8:].tobytes()
        values = (_ids(namespace, keys), _digits(namespace, keys), body, json_list(slots), owner)
        with self._changing(), self._write("publish") as connection:
            if connection.execute(_PUBLISH, values).rowcount == len(records):
                return np.ones(len(records), dtype=np.bool_)
        return np.asarray(self.lookup(namespace, keys).records == records)

    def delete(self, namespace: int, keys: bytes, slots: Slots) -> npt.NDArray[np.bool_]:
        """(n,) True where the key still had this slot: the object is gone, its slot settles. StoreError."""
        gone = np.zeros(len(slots), dtype=np.bool_)
        with self._changing(), self._transaction("delete") as connection:
            (text,) = connection.execute(_MATCH, (json_list(slots), _digits(namespace, keys))).fetchone()
            if text:
                gone[numbers(text)] = True
                connection.execute(_DELETE, (json_list(slots[gone]),))
        return gone

    def remove(self, slots: Slots) -> int:
        """Delete what these slots hold, whatever it is; how many objects. StoreError."""
        with self._changing(), self._write("remove") as connection:
            return connection.execute(_DELETE, (json_list(slots),)).rowcount

    def occupants(self, first: int, last: int) -> Occupants:
        """The objects in the slots `first` to `last` - 1. StoreError."""
        with self._read("occupants") as connection:
            ids, slots, body = connection.execute(_OCCUPANTS, (first, last)).fetchone()
        rows = np.frombuffer(bytes.fromhex(ids or ""), dtype=np.uint8).reshape(-1, _ID_SIZE)
        return Occupants(rows[:, _ID_SIZE - KEY_SIZE :], _records(numbers(slots), body))

    def clear(self, namespace: int) -> int:
        """Put all objects of a namespace out of sight, of all processes and at once; how many they were. `purge`
        deletes them. StoreError."""
        with self._changing(), self._transaction("clear") as connection:
            seen = usage(connection, f"where namespace = {namespace} and state != '{CLEARING}'").used
            connection.execute(_CLEAR, (namespace,))
        return seen

    def purge(self) -> bool:
        """Delete a piece of what was cleared, by whomever; False where there is nothing more. StoreError."""
        with self._read("purge") as reader:  # most often there is nothing, and no turn at writing is needed
            (segment,) = reader.execute(f"select min(id) from segments where state = '{CLEARING}'").fetchone()
        if segment is None:
            return False
        with self._changing(), self._transaction("purge") as connection:
            if connection.execute(_PURGE, (segment,)).rowcount < _PURGE_PIECE:
                connection.execute(f"update segments set state = '{ACTIVE}' where id = ?", (segment,))
        return True


def nothing(keys: bytes) -> Lookup:
    """What is said where nothing can be said."""
    count = len(keys) // KEY_SIZE
    return Lookup(_absent(count), 0, np.full(count, NO_SLOT))


def _locate(connection: Connection, wanted: Marks) -> tuple[Moment, Slots]:
    """By the B-tree of marks."""
    order = _order(wanted)
    epoch, clearing, slots = connection.execute(_LOCATE, (json_list(wanted[order]),)).fetchone()
    found = np.empty(len(wanted), dtype=np.int64)
    found[order] = numbers(slots)
    return Moment(epoch, clearing), found


def _lookup(connection: Connection, namespace: int, keys: bytes, wanted: Marks) -> tuple[Moment, Records]:
    order = _order(wanted)
    values = (json_list(wanted[order]), _ids(namespace, keys, order))
    epoch, clearing, slots, bodies = connection.execute(_LOOKUP, values).fetchone()
    records = np.empty(len(wanted), dtype=RECORD_DTYPE)
    records[order] = _records(numbers(slots), bodies)
    return Moment(epoch, clearing), records


def _order(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """In which to ask for them: that of the B-tree where they are many, since neighbours share pages."""
    return np.argsort(values) if len(values) >= _SORTED_FROM else np.arange(len(values))


def _digits(namespace: int, keys: bytes) -> bytes:
    """The n marks, _MARK digits each. As bytes: for each piece of a text SQLite counts characters from the start."""
    found = marks(namespace, keys).view(np.int64).tolist()
    return (f"%{_MARK}d" * len(found) % tuple(found)).encode()


def _ids(namespace: int, keys: bytes, order: npt.NDArray[np.int64] | None = None) -> bytes:
    """The n keys of 32 bytes, in this order, each behind its namespace."""
    assert len(keys) % KEY_SIZE == 0
    rows = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_SIZE)
    ids = np.empty((len(rows), _ID_SIZE), dtype=np.uint8)
    ids[:, :4] = np.frombuffer(namespace.to_bytes(4, "big"), dtype=np.uint8)
    ids[:, 4:] = rows if order is None else rows[order]
    return ids.tobytes()


def _records(slots: Slots, bodies: str | None) -> Records:
    """What SQLite said of these slots: None where it was about nothing."""
    packed = np.frombuffer(bytes.fromhex(bodies or ""), dtype=_BODY_DTYPE)
    records = np.empty(len(packed), dtype=RECORD_DTYPE)
    records["slot"] = slots
    for name in _BODY_DTYPE.names or ():
        records[name] = packed[name]
    return records


def _absent(count: int) -> Records:
    records = zeros(count, RECORD_DTYPE)
    records["slot"] = NO_SLOT
    return records
