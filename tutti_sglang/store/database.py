"""The index's connections: one for writing, behind a lock, and a pool for readers, none of which survives a fork."""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tutti_sglang.errors import StoreError
from tutti_sglang.metrics import Metrics, process_metrics
from tutti_sglang.store import schema
from tutti_sglang.store.directory import identity
from tutti_sglang.store.filesystem import look_at, refuse_network
from tutti_sglang.units import format_size

FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""What a statement on a damaged database raises: SQLite quotes names from the file as they are."""

_IDLE_READERS = 4
_LOG_SECONDS = 0.1
"""How often the size of the log is looked at: it grows by megabytes meanwhile."""
_LONG = 0.5
_REMEDY = "If it does not go away, stop all servers of this store and remove index.db*: the store starts empty"


def json_list(values: Any) -> str:
    """An array of integers as SQLite's `json_each` takes it: one argument for a whole batch."""
    return msgspec.json.encode(values.tolist()).decode()


def numbers(text: str | None) -> npt.NDArray[np.int64]:
    """What SQLite's group_concat made of integers: None where there was none."""
    return np.fromstring(text or "", dtype=np.int64, sep=",")


class Database:
    """A SQLite database that many processes share; every batch is one statement.

    Each step of a statement gives the GIL away, and beside a busy Python thread every return costs milliseconds.
    Writing methods raise StoreError when they have changed nothing: another process keeps the write lock for longer
    than WRITE_TIMEOUT, a full disk, damage.
    """

    def __init__(self, path: Path, metrics: Metrics | None = None) -> None:
        refuse_network(path.parent)
        self.path = path
        self._metrics = metrics or process_metrics()
        self._pid = os.getpid()
        self._write_lock = threading.Lock()
        self._writing_since: float | None = None
        self._next_look_at_log = 0.0
        self._readers: list[sqlite3.Connection] = []
        self._closed = False
        try:
            self._writer = schema.open_database(path)
        except FAILURES as error:
            raise StoreError(f"The index {path} cannot be opened ({error})", _REMEDY) from error
        self._file = identity(str(path.parent), path.name)

    def meta(self, name: str) -> str | None:
        """A setting of the store, None where it was never set."""
        with self._write("meta") as connection:
            row = connection.execute("select value from meta where name = ?", (name,)).fetchone()
        return row[0] if row else None

    def set_meta(self, name: str, value: str) -> None:
        """Set it for all processes."""
        with self._write("meta") as connection:
            connection.execute("insert or replace into meta values (?, ?)", (name, value))

    @property
    def held_up(self) -> bool:
        """Whether something has been being written for long: another process is at it, or the drive does not answer."""
        since = self._writing_since
        return since is not None and time.monotonic() > since + _LONG

    def close(self) -> None:
        """Idempotent. A reader that is under way ends by itself."""
        self._closed = True
        with self._write_lock:
            self._writer.close()
            while self._readers:
                self._readers.pop().close()

    @contextlib.contextmanager
    def _write(self, operation: str) -> Iterator[sqlite3.Connection]:
        """The writer's connection; each statement commits by itself."""
        self._check_process()
        if not self._write_lock.acquire(timeout=2 * schema.WRITE_TIMEOUT):
            self._metrics.add("tutti_index_errors", op=operation)
            message = f"The index {self.path} failed at {operation} (another thread has been waiting for it for long)"
            raise StoreError(message, look_at(self.path.parent))
        try:
            self._writing_since = time.monotonic()
            with self._explained(operation):
                self._check_log()
                yield self._writer
                self._look_once()
        finally:
            self._writing_since = None
            self._write_lock.release()

    def _look_once(self) -> None:
        """The first to read after a commit writes to the memory that all connections share, a file: where the drive
        does not answer, that must not be a lookup."""
        with contextlib.suppress(StoreError), self._read("look") as connection:
            connection.execute("select value from epoch").fetchone()

    @contextlib.contextmanager
    def _transaction(self, operation: str) -> Iterator[sqlite3.Connection]:
        """The writer's connection in a transaction that commits at the end, all or nothing."""
        with self._write(operation) as connection:
            connection.execute("begin immediate")
            try:
                yield connection
                connection.execute("commit")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("rollback")
                raise

    @contextlib.contextmanager
    def _read(self, operation: str) -> Iterator[sqlite3.Connection]:
        """A connection that no writer holds up, given back at the end. StoreError."""
        self._check_process()
        with self._explained(operation):
            try:
                connection = self._readers.pop()
            except IndexError:
                connection = self._connect()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            if self._closed or len(self._readers) >= _IDLE_READERS:
                connection.close()
            else:
                self._readers.append(connection)

    def _connect(self) -> sqlite3.Connection:
        """One more for reading. A file that took the place of a deleted one is the index of other segments: what it
        says of slots is not so of those that are open here."""
        if self._in_place():
            connection = schema.connect(self.path, schema.READ_TIMEOUT)
            connection.execute("pragma query_only = on")
            if self._in_place():
                return connection
            connection.close()
        raise sqlite3.OperationalError("it was deleted")

    def _in_place(self) -> bool:
        return identity(str(self.path.parent), self.path.name) == self._file

    @contextlib.contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            self._metrics.add("tutti_index_errors", op=operation)
            busy = "locked" in str(error) or "busy" in str(error)
            hint = "Another process is writing; find one that is stopped with: ps -eo pid,stat,cmd" if busy else _REMEDY
            raise StoreError(f"The index {self.path} failed at {operation} ({error})", hint) from error

    def _check_log(self) -> None:
        """A process that was stopped in the middle of a read keeps the log from being used again: rather than fill the
        disk, nothing is written."""
        if time.monotonic() < self._next_look_at_log:
            return
        self._next_look_at_log = time.monotonic() + _LOG_SECONDS
        try:
            size = os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return
        if size > schema.WAL_MAX:
            _, frames, moved = self._writer.execute("pragma wal_checkpoint(passive)").fetchone()
            if moved < frames:
                self._next_look_at_log = 0.0
                self._metrics.add("tutti_index_errors", op="checkpoint")
                raise StoreError(
                    f"The log of the index {self.path} has grown to {format_size(size)}, because a reader does not end",
                    "Find a process that is stopped with: ps -eo pid,stat,cmd | grep ' T'",
                )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                "The store was opened before fork(): its locks and connections belong to the parent process",
                "Open the store in the process that uses it, or start processes with spawn",
            )
