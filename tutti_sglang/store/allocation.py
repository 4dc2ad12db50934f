"""Who holds which slot: segments, free slots, leases. The index is the only authority, whatever process dies where."""

import time
from collections.abc import Collection
from sqlite3 import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tutti_sglang.geometry import Stripe
from tutti_sglang.store import slots as numbering
from tutti_sglang.store.database import Database, json_list, numbers
from tutti_sglang.store.slots import Ranges, Slots

ACTIVE, CLEARING = "active", "clearing"
"""States of a segment."""

_SEGMENTS_PER_LEASE = 64
_SETTLE_MAX = 1 << 14

CHANGES_KEPT = 1 << 16
"""Of the latest changes of objects: whoever has missed more of them looks at all objects anew."""

_BITS = """
    select group_concat(segment || ' ' || group_size || ' ' || slots || ' ' || hex(bits))
    from ({}) join segments on segments.id = segment
"""
_RICHEST = _BITS.format(f"""
    select segment, bits from free join segments on segments.id = segment
    where free.namespace = ? and count > 0 and state = '{ACTIVE}' and segment not in (select value from json_each(?))
    order by count desc limit {_SEGMENTS_PER_LEASE}
""")
_NAMED = _BITS.format("select segment, bits from free where segment in (select value from json_each(?))")
_SET_BITS = """
    update free set count = new.count, bits = substr(?1, new.start + 1, new.size)
    from (select json_extract(value, '$[0]') as segment, json_extract(value, '$[1]') as count,
                 json_extract(value, '$[2]') as start, json_extract(value, '$[3]') as size from json_each(?2)) as new
    where free.segment = new.segment
"""
_DUE = f"select group_concat(slot) from (select slot from settling where epoch <= ? order by epoch limit {_SETTLE_MAX})"
_FORGET = f"""
    delete from changes where id < min((select min(id) from changes) + {_SETTLE_MAX},
                                       (select max(id) from changes) - {CHANGES_KEPT})
"""
_GIVE_BACK = """
    insert into settling
    select slot, value + 1 from leased, epoch where owner = ?1 and slot in (select value from json_each(?2))
"""
_RECLAIM = "insert into settling select slot, value + 1 from leased, epoch where owner = ?"
_USAGE = """
    select count(*), coalesce(sum(slots), 0), coalesce(sum(count), 0),
           (select count(*) from settling where slot >> 24 in (select id from chosen)),
           (select count(*) from leased where slot >> 24 in (select id from chosen))
    from chosen left join free on free.segment = chosen.id
"""
_EMPTY = """
select json_group_array(s.id) from segments s join free on free.segment = s.id
where slots = free.count + (
    select count(*) from settling where slot >= s.id << :shift and slot < (s.id + 1) << :shift
)
"""


class SegmentRow(msgspec.Struct, frozen=True, array_like=True):
    """A segment as the index knows it. `clock`: offset of its first slot's byte in the file `clock`; `created`: Unix
    seconds; `state`: active, or clearing (what it holds is gone from sight and being deleted; nothing is leased)."""

    id: int
    namespace: int
    cycle: tuple[int, ...]
    group: int
    slots: int
    stripe: Stripe
    state: str
    clock: int
    created: int


class Usage(NamedTuple):
    """Segments, and slots by state; `settling`: freed, but a reader may still be reading them."""

    segments: int
    slots: int
    free: int
    settling: int
    leased: int

    @property
    def used(self) -> int:
        """Slots that hold an object."""
        return self.slots - self.free - self.settling - self.leased


class _Bits(NamedTuple):
    """The free slots of one segment."""

    segment: int
    group: int
    free: npt.NDArray[np.bool_]


class Allocation(Database):
    """Segments, free slots and leases. A slot is free, leased, holds an object, or settles; never two of them."""

    def add_segment(self, namespace: int, cycle: tuple[int, ...], group: int, slots: int, stripe: Stripe) -> int:
        """Record a segment whose files are ready; all its slots become free. → its id, new for ever. StoreError."""
        assert 0 < slots <= numbering.SLOTS_MAX
        assert slots % group == 0
        now = int(time.time())
        with self._transaction("add_segment") as connection:
            clock = _first_gap(connection.execute("select clock, slots from segments order by clock").fetchall(), slots)
            row = (namespace, msgspec.json.encode(cycle).decode(), group, slots, stripe, ACTIVE, clock, now)
            identifier = connection.execute(
                "insert into segments (namespace, cycle, group_size, slots, stripe, state, clock, created) "
                "values (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            ).lastrowid
            assert identifier is not None
            bits = np.packbits(np.ones(slots, dtype=np.bool_), bitorder="little").tobytes()
            connection.execute("insert into free values (?, ?, ?, ?)", (identifier, namespace, slots, bits))
        return identifier

    def segments(self) -> list[SegmentRow]:
        """All segments, by id. StoreError."""
        with self._read("segments") as connection:
            (text,) = connection.execute(
                "select json_group_array(json_array(id, namespace, json(cycle), group_size, slots, stripe, state, "
                "clock, created)) from (select * from segments order by id)"
            ).fetchone()
        return msgspec.json.decode(text, type=list[SegmentRow])

    def drop_segment(self, segment: int) -> int:
        """Forget a segment, its objects and its leases; the objects that went. Its files can be removed afterwards, but
        not be written over: a reader may hold them open. StoreError."""
        first, last = segment << numbering.SEGMENT_SHIFT, (segment + 1) << numbering.SEGMENT_SHIFT
        with self._transaction("drop_segment") as connection:
            for table in ("settling", "leased"):  # first: this is how a segment goes that has a slot in two states
                connection.execute(f"delete from {table} where slot >= ? and slot < ?", (first, last))
            gone = connection.execute("delete from objects where slot >= ? and slot < ?", (first, last)).rowcount
            connection.execute("delete from settling where slot >= ? and slot < ?", (first, last))
            connection.execute("delete from free where segment = ?", (segment,))
            connection.execute("delete from segments where id = ?", (segment,))
        return gone

    def lease(self, owner: str, namespace: int, want: int, oldest_epoch: int, avoid: Collection[int] = ()) -> Ranges:
        """(m, 2) ranges of about `want` slots that now belong to `owner`, fewer (0, 2) where there are not so many.

        `avoid`: segments that `owner` cannot write to. `oldest_epoch` comes from `Owners.oldest_epoch`: slots freed
        later than that are not touched yet. StoreError.
        """
        with self._transaction("lease") as connection:
            _settle(connection, oldest_epoch)
            taken, changed = [], []
            for bits in _load(connection, _RICHEST, namespace, msgspec.json.encode(list(avoid)).decode()):
                numbers = numbering.choose(bits.free, bits.group, want)
                bits.free[numbers] = False
                changed.append(bits)
                taken.append(numbering.slot_ids(bits.segment, numbers))
                want -= len(numbers)
                if want <= 0:
                    break
            slots = np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)
            _store(connection, changed)
            connection.execute("insert into leased select value, ?1 from json_each(?2)", (owner, json_list(slots)))
        return numbering.ranges_of(slots)

    def settle(self, oldest_epoch: int) -> int:
        """Make slots free that nobody can be reading any more, some thousands at once; how many they were. `lease` does
        so too. StoreError."""
        with self._transaction("settle") as connection:
            return _settle(connection, oldest_epoch)

    def give_back(self, owner: str, slots: Slots) -> int:
        """Free slots that `owner` leased and did not publish; how many they were. StoreError."""
        with self._write("give_back") as connection:
            return connection.execute(_GIVE_BACK, (owner, json_list(slots))).rowcount

    def reclaim(self, owner: str) -> int:
        """Free all that a dead owner leased and did not publish; how many they were. StoreError."""
        with self._write("reclaim") as connection:
            return connection.execute(_RECLAIM, (owner,)).rowcount

    def lessees(self) -> set[str]:
        """Owners that hold leases: one of them without a living process is to be reclaimed. StoreError."""
        with self._read("lessees") as connection:
            (text,) = connection.execute("select group_concat(distinct owner) from leased").fetchone()
        return set(text.split(",")) if text else set()

    def empty_segments(self) -> list[int]:
        """Segments all of whose slots are free or settling. StoreError."""
        with self._read("empty_segments") as connection:
            (text,) = connection.execute(_EMPTY, {"shift": numbering.SEGMENT_SHIFT}).fetchone()
        return msgspec.json.decode(text, type=list[int])

    def free_slots(self, namespace: int) -> int:
        """Slots of a namespace that hold nothing and belong to nobody, settling ones included. StoreError."""
        usage = self.usage(namespace)
        return usage.free + usage.settling

    def usage(self, namespace: int | None = None) -> Usage:
        """Slots of one namespace, or of all, by state; no object is looked at. StoreError."""
        with self._read("usage") as connection:
            return usage(connection, "" if namespace is None else f"where namespace = {namespace}")


def usage(connection: Connection, which: str) -> Usage:
    """Of the segments that the `where` clause chooses."""
    query = f"with chosen as (select id, slots from segments {which}) {_USAGE}"
    return Usage(*connection.execute(query).fetchone())


def _first_gap(taken: list[tuple[int, int]], size: int) -> int:
    """Where `size` bytes fit between the (offset, size) that are taken, ascending."""
    end = 0
    for offset, length in taken:
        if offset - end >= size:
            break
        end = offset + length
    return end


def _settle(connection: Connection, oldest_epoch: int) -> int:
    """Slots freed at or before `oldest_epoch` can be read by nobody any more: they become free. And the oldest changes
    are of no use any more."""
    connection.execute(_FORGET)
    (text,) = connection.execute(_DUE, (oldest_epoch,)).fetchone()
    if not text:
        return 0
    slots = numbers(text)
    segments = numbering.segments_of(slots)
    changed = _load(connection, _NAMED, json_list(np.unique(segments)))
    for bits in changed:
        bits.free[numbering.numbers_of(slots[segments == bits.segment])] = True
    _store(connection, changed)
    query = "delete from settling where slot in (select value from json_each(?))"
    return connection.execute(query, (json_list(slots),)).rowcount


def _load(connection: Connection, query: str, *values: Any) -> list[_Bits]:
    (text,) = connection.execute(query, values).fetchone()
    return [_parse(*row.split(" ")) for row in text.split(",")] if text else []


def _parse(segment: str, group: str, slots: str, bits: str) -> _Bits:
    packed = np.frombuffer(bytes.fromhex(bits), dtype=np.uint8)
    return _Bits(int(segment), int(group), np.unpackbits(packed, count=int(slots), bitorder="little").astype(np.bool_))


def _store(connection: Connection, changed: list[_Bits]) -> None:
    packed = [np.packbits(bits.free, bitorder="little").tobytes() for bits in changed]
    ends = np.cumsum([len(each) for each in packed]).tolist()
    rows = [
        (bits.segment, int(bits.free.sum()), end - len(each), len(each))
        for bits, each, end in zip(changed, packed, ends, strict=True)
    ]
    connection.execute(_SET_BITS, (b"".join(packed), msgspec.json.encode(rows).decode()))
