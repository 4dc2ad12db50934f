"""The tables of the index, and a connection to them."""

import os
import sqlite3
import time
from pathlib import Path

from tutti_sglang.errors import ForeignStoreError, StoreError

FORMAT = 3
APPLICATION = 0x54555449
"""SQLite's application id: `TUTI`."""

READ_TIMEOUT = 0.1
"""Seconds a reader waits for the rare exclusive moments of a WAL (recovery, the last close)."""
WRITE_TIMEOUT = 1.0
"""Seconds a writer waits for another one."""

WAL_MAX = 256 << 20
"""Bytes to which the write-ahead log may grow while a stopped reader keeps it from being used again."""

_OPEN_TIMEOUT = 5.0
_CACHE_KIB = 16 << 10  # of each connection; every commit of anybody empties it, which takes longer the more it holds
_OLDEST_SQLITE = (3, 35, 0)

# A slot of a segment is in exactly one of: the bits of `free`, `leased`, `objects`, `settling`. The triggers keep it
# so, and make a publish one statement: no process holds the write lock while it waits for its own GIL.
_TABLES = """
create table meta (name text primary key, value text not null) without rowid;

create table epoch (id integer primary key check (id = 0), value integer not null);
insert into epoch values (0, 1);

create table namespaces (
    id integer primary key autoincrement,
    digest blob not null unique,
    readable text not null,
    created integer not null,
    hand integer not null default 0,        -- of its clock: a place in its slots, segment after segment
    heat real not null default 0,           -- bytes hit, each counted half per half-life, as of `heated`
    heated real not null default 0
);

create table written (                      -- by all processes
    day integer not null,
    drive integer not null,
    bytes integer not null,
    primary key (day, drive)
) without rowid;

create table segments (
    id integer primary key autoincrement,   -- never used again: a slot id means one place for ever
    namespace integer not null references namespaces,
    cycle text not null,                    -- JSON list of drive ordinals
    group_size integer not null,
    slots integer not null,
    stripe text not null,
    state text not null,                    -- active | clearing: what it holds is gone from sight, and being deleted
    clock integer not null,                 -- offset of its first byte in the file `clock`
    created integer not null
);

create index segments_clearing on segments (id) where state = 'clearing';

create table free (                         -- slots that may be leased: a bit each, least significant first
    segment integer primary key references segments,
    namespace integer not null,
    count integer not null,
    bits blob not null
);
create index free_by_count on free (namespace, count);

create table leased (slot integer primary key, owner text not null);

create table settling (slot integer primary key, epoch integer not null);  -- freed; a reader may still read it
create index settling_by_epoch on settling (epoch);

-- By slot: a run lies together here as it does on the drives. The index alone answers what is there: half the bytes of
-- the keys would be too many pages to read for each batch.
create table objects (
    slot integer primary key,
    mark integer not null,                  -- hash of the id
    id blob not null,                       -- namespace, 4 bytes big-endian, and the key's 32 bytes
    record blob not null
);
create unique index objects_by_mark on objects (mark);

create table changes (                      -- the latest: by them copies in memory are kept up to date
    id integer primary key,
    slot integer not null,                  -- -1: the object is gone
    mark integer not null
);

create trigger published after insert on objects begin
    delete from leased where slot = new.slot;
    insert into changes (slot, mark) values (new.slot, new.mark);
end;

create trigger deleted after delete on objects begin
    insert into settling select old.slot, value + 1 from epoch;
    insert into changes (slot, mark) values (-1, old.mark);
end;

create trigger freed after insert on settling begin
    update epoch set value = value + 1;
    delete from leased where slot = new.slot;
end;
"""


def open_database(path: Path) -> sqlite3.Connection:
    """The writer's connection to the index at `path`, created where there is none. StoreError, ForeignStoreError."""
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old for the index", "Need 3.35 or newer")
    _create_private(path)
    deadline = time.monotonic() + _OPEN_TIMEOUT
    while True:
        connection = connect(path, WRITE_TIMEOUT)
        try:
            _prepare(connection, path)
            return connection
        except BaseException as error:
            connection.close()
            # Two processes that create the same database meet here: SQLite does not wait for the switch to WAL.
            busy = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def connect(path: Path, timeout: float) -> sqlite3.Connection:
    """A bare connection, used by one thread at a time. Nothing of the database is memory-mapped."""
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
    connection.execute("pragma mmap_size = 0")
    connection.execute(f"pragma cache_size = -{_CACHE_KIB}")
    connection.execute("pragma synchronous = normal")
    connection.execute("pragma temp_store = memory")  # the journal of a statement would be a file for every publish
    connection.execute(f"pragma journal_size_limit = {WAL_MAX // 2}")
    connection.execute("pragma trusted_schema = off")
    connection.execute("pragma secure_delete = off")  # distributions switch it on: hashes of tokens need no wiping
    return connection


def _create_private(path: Path) -> None:
    """Make the file 0600 before SQLite does. A file that exists is never opened here: closing it would drop the locks
    that SQLite holds on it in this process."""
    if path.is_symlink():
        raise StoreError(f"{path} is a symbolic link; links are not followed", f"Write the real path, {path.resolve()}")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise StoreError(f"The index {path} cannot be created ({error.strerror})", "Check index_dir") from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    application, version = _identity(connection)
    if application == 0 and version == 0:
        connection.execute("pragma journal_mode = wal")
        connection.execute("begin immediate")
        try:
            application, version = _identity(connection)
            if application == 0:
                _create_tables(connection, path)
                application, version = APPLICATION, FORMAT
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise
    if application != APPLICATION:
        raise ForeignStoreError(f"{path} is a database of another program", "Name another index_dir")
    if version != FORMAT:
        raise ForeignStoreError(
            f"{path} is an index of format {version}; this version of tutti-sglang reads format {FORMAT}",
            "Name another index_dir, or remove the store to start empty",
        )


def _identity(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,) = connection.execute("pragma application_id").fetchone()
    (version,) = connection.execute("pragma user_version").fetchone()
    return application, version


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("select count(*) from sqlite_schema").fetchone()[0]:
        raise ForeignStoreError(f"{path} is a database of another program", "Name another index_dir")
    for statement in _statements(_TABLES):
        connection.execute(statement)
    connection.execute(f"pragma application_id = {APPLICATION}")
    connection.execute(f"pragma user_version = {FORMAT}")


def _statements(script: str) -> list[str]:
    """`executescript` would commit the transaction that makes creation all or nothing."""
    found: list[str] = []
    text = ""
    for line in script.splitlines(keepends=True):
        text += line
        if text.strip() and sqlite3.complete_statement(text):
            found.append(text)
            text = ""
    assert not text.strip(), text
    return found
