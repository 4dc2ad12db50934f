"""The table in memory of an index: loaded, kept up and made anew, a little at a time."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from sqlite3 import Connection
from typing import NamedTuple

import numpy as np

from tutti_sglang.metrics import Metrics
from tutti_sglang.store.commits import Commits
from tutti_sglang.store.database import numbers
from tutti_sglang.store.registry import Registry
from tutti_sglang.store.slots import NO_SLOT, Slots, segments_of
from tutti_sglang.store.table import Loader, Marks, News, Table

OBJECTS_MAX = 1 << 22
"""Objects of a store that are kept in memory, 16 bytes each, of every process. With more the B-tree answers."""

NEWS_MAX = 1 << 12
"""Changes that one look takes note of."""

_PIECE = 1 << 13

NEWS = f"""
    (select coalesce(max(id), 0) from changes),
    (select group_concat(cast(slot as integer) || ',' || cast(mark as integer))
     from (select slot, mark from changes where id > ?1 and id <= ?1 + {NEWS_MAX} order by id))
"""
"""Two columns, for `news_of`: what changed after number ?1."""
_NEWS = f"select {NEWS}"
_LAST = "select coalesce(max(id), 0) from changes"
_OBJECTS = f"""
    select group_concat(mark), group_concat(slot) from
    (select mark, slot from objects indexed by objects_by_mark where mark >= ? and typeof(mark) = 'integer'
     order by mark limit {_PIECE})
"""


def news_of(last: int, end: int, changes: str | None) -> News:
    """What the columns NEWS said."""
    rows = numbers(changes).reshape(-1, 2)
    return News(last, min(end, last + NEWS_MAX), end, rows[:, 0], rows[:, 1])


LATELY = 0.5
"""Seconds for which who puts may not know what other processes have put or removed: the worst is a copy too many, or a
page that is not stored because it was there a moment ago."""


class Moment(NamedTuple):
    """Of the index. `clearing`: segments that are out of sight."""

    epoch: int
    clearing: str | None

    def in_sight(self, slots: Slots) -> Slots:
        """NO_SLOT instead of those in segments that are being cleared."""
        if not self.clearing:
            return slots
        return np.where(np.isin(segments_of(slots), numbers(self.clearing)), NO_SLOT, slots)


class Look(NamedTuple):
    """The latest one into the index, for the table. `last`: the number of the newest change that it saw; `header`: of
    before; `changes`: of this process, made before; `at`: time.monotonic()."""

    moment: Moment
    last: int
    header: bytes | None
    changes: int
    at: float


class Mirror(Registry):
    """An index of which `table` may be a copy in memory."""

    def __init__(self, path: Path, metrics: Metrics | None = None) -> None:
        super().__init__(path, metrics)
        self.table: Table | None = None
        self._commits = Commits(path)
        self._look: Look | None = None
        self._changes = 0
        self._loader: Loader | None = None
        self._too_many = False

    def mirror(self, until: float) -> None:
        """Load the table, or keep it up, at least a piece and until a time at most. For one thread. StoreError."""
        with self._read("mirror") as connection:
            while self._step(connection) and time.monotonic() < until:
                pass

    def _step(self, connection: Connection) -> bool:
        """Whether there is more to do."""
        if self.table:
            return self._keep_up(connection, self.table)
        return not self._too_many and self._load(connection)

    def _keep_up(self, connection: Connection, table: Table) -> bool:
        news = news_of(table.last, *connection.execute(_NEWS, (table.last,)).fetchone())
        if not table.learn(news):
            self.table = None
            return True
        if table.aged:
            self.table = table.merged()
        return table.last < news.end

    def _load(self, connection: Connection) -> bool:
        if self._loader is None:
            self._loader = Loader(int(connection.execute(_LAST).fetchone()[0]))
        marks, slots = map(numbers, connection.execute(_OBJECTS, (self._loader.next,)).fetchone())
        self._loader.add(marks, slots)
        if len(marks) == _PIECE and self._loader.next is not None:
            self._too_many = self._loader.count > OBJECTS_MAX
        else:
            self.table = self._loader.table()
        if self.table or self._too_many:
            self._loader = None
        return not self._too_many

    def state(self) -> bytes | None:
        """What the next commit of anybody will change; None where that cannot be said."""
        return self._commits.header()

    def _remembered(self, wanted: Marks, lately: bool) -> Slots | None:
        """By the table and the latest look alone, where nothing was changed since."""
        look, table = self._look, self.table
        if look is None or table is None or look.changes != self._changes:
            return None
        if not (lately and time.monotonic() < look.at + LATELY):
            header = self.state()
            if header is None or header != look.header:
                return None
        last, slots = table.guess(wanted)
        # A table that was made anew while one looked at the old one has yet to learn what that one did.
        return look.moment.in_sight(slots) if last >= look.last else None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """What this process has changed itself, it knows at once."""
        try:
            yield
        finally:
            self._changes += 1
