"""The namespaces of a store: their numbers, the hands of their clocks, how hot they are, and what all of them wrote."""

import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tutti_sglang.errors import StoreError
from tutti_sglang.store.allocation import Allocation
from tutti_sglang.store.eviction import Share, cooled
from tutti_sglang.store.namespace import Namespace


class NamespaceRow(NamedTuple):
    """A namespace as the index knows it; `readable` is its JSON, maybe of another format; `created` Unix seconds."""

    digest: bytes
    readable: str
    created: int

    @property
    def tensors(self) -> tuple[int, ...]:
        """Bytes of each tensor of an object. StoreError."""
        try:
            return msgspec.json.decode(self.readable, type=_Tensors).tensors
        except (msgspec.DecodeError, RecursionError) as error:
            raise StoreError(
                f"The index is damaged: what it says of a namespace cannot be read ({error})",
                "Stop all servers of this store and remove index.db*: the store starts empty",
            ) from error


class _Tensors(msgspec.Struct):
    tensors: tuple[int, ...]


class Registry(Allocation):
    """What is known of namespaces beside their objects."""

    def namespace_id(self, namespace: Namespace) -> int:
        """The number of a namespace in this store, given out at first sight. StoreError."""
        digest, query = namespace.digest(), "select id from namespaces where digest = ?"
        with self._read("namespace") as reader:  # a known one needs no turn at writing
            known = reader.execute(query, (digest,)).fetchone()
        if known:
            return int(known[0])
        with self._write("namespace") as connection:
            connection.execute(
                "insert or ignore into namespaces (digest, readable, created) values (?, ?, ?)",
                (digest, namespace.readable(), int(time.time())),
            )
            return int(connection.execute(query, (digest,)).fetchone()[0])

    def namespaces(self) -> dict[int, NamespaceRow]:
        """All namespaces ever seen by number, those of other formats too. StoreError."""
        with self._read("namespaces") as connection:
            rows = connection.execute("select id, digest, readable, created from namespaces order by id").fetchall()
        return {row[0]: NamespaceRow(*row[1:]) for row in rows}

    def move_hand(self, namespace: int, step: int, slots: int) -> int:
        """Move the hand of a namespace's clock of so many slots; where it was. Processes that evict at the same time
        get different stretches. StoreError."""
        with self._transaction("hand") as connection:
            query = "select hand from namespaces where id = ?"
            hand = int(connection.execute(query, (namespace,)).fetchone()[0]) % slots
            connection.execute("update namespaces set hand = ? where id = ?", ((hand + step) % slots, namespace))
        return hand

    def add_heat(self, hit_bytes: Mapping[int, int]) -> None:
        """Count bytes that were hit, by namespace; 0 where it was only written to. StoreError."""
        now = time.time()
        with self._transaction("heat") as connection:
            for namespace, nbytes in hit_bytes.items():
                row = connection.execute("select heat, heated from namespaces where id = ?", (namespace,)).fetchone()
                heat = cooled(row[0], now - row[1]) + nbytes
                connection.execute("update namespaces set heat = ?, heated = ? where id = ?", (heat, now, namespace))

    def shares(self, size: Mapping[int, int]) -> list[Share]:
        """What each namespace has, for `eviction.donor`; `size`: bytes of its segments. StoreError."""
        now = time.time()
        with self._read("shares") as connection:
            rows = connection.execute("select id, heat, heated from namespaces").fetchall()
        return [
            Share(number, size.get(number, 0), cooled(heat, now - heated), max(0.0, now - heated))
            for number, heat, heated in rows
        ]

    def count_written(self, day: int, nbytes: Mapping[int, int]) -> dict[int, int]:
        """Add to the bytes that all processes wrote on that day, by drive; the sums. StoreError."""
        with self._transaction("written") as connection:
            for drive, more in nbytes.items():
                connection.execute(
                    "insert into written values (?1, ?2, ?3) on conflict do update set bytes = bytes + ?3",
                    (day, drive, more),
                )
            return dict(connection.execute("select drive, bytes from written where day = ?", (day,)).fetchall())
