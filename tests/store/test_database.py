"""The index's file among many processes: killed, stopped, forked, damaged, foreign."""

import contextlib
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.store.index_kit import (
    EVER,
    GROUP,
    NAMESPACE,
    ROOT,
    SLOTS,
    check,
    new_keys,
    new_records,
    open_index,
    stored,
)
from tutti_sglang.errors import ForeignStoreError, StoreError
from tutti_sglang.geometry import Stripe
from tutti_sglang.store import database, filesystem, schema
from tutti_sglang.store.index import Index
from tutti_sglang.store.slots import NO_SLOT, slots_of


def test_a_reader_never_waits_for_a_writer(index: Index, space: int) -> None:
    keys, records = stored(index, space, 4)
    writer = sqlite3.connect(index.path, isolation_level=None)
    writer.execute("begin immediate")
    writer.execute("delete from objects")
    assert (index.lookup(space, keys).records == records).all()
    writer.execute("rollback")
    writer.close()


def test_a_writer_that_gets_no_turn_fails_without_a_trace(index: Index, space: int) -> None:
    slots = slots_of(index.lease("me", space, 4, EVER))
    keys = new_keys(4)
    index._writer.execute("pragma busy_timeout = 50")
    other = sqlite3.connect(index.path, isolation_level=None)
    other.execute("begin immediate")
    for attempt in (
        lambda: index.publish("me", space, keys, new_records(slots)),
        lambda: index.lease("me", space, 4, EVER),
        lambda: index.delete(space, keys, slots),
    ):
        with pytest.raises(StoreError, match="Another process"):
            attempt()
    other.execute("rollback")
    other.close()
    assert index._metrics.value("tutti_index_errors", op="publish") == 1
    assert index.publish("me", space, keys, new_records(slots)).all()
    check(index)


def test_a_reader_that_does_not_end_costs_writes_but_not_the_disk(
    index: Index, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "WAL_MAX", 1 << 20)
    monkeypatch.setattr(database, "_LOG_SECONDS", 0.0)
    index._next_look_at_log = 0.0
    reader = sqlite3.connect(index.path, isolation_level=None)
    reader.execute("begin")
    reader.execute("select count(*) from objects").fetchone()
    log = index.path.parent / "index.db-wal"

    def fill() -> None:
        for _ in range(2000):
            index.set_meta("filler", "x" * 10_000)

    with pytest.raises(StoreError, match="stopped"):
        fill()
    assert log.stat().st_size < 2 << 20
    assert len(index.lookup(space, new_keys(3)).records) == 3
    reader.execute("rollback")
    reader.close()
    for _ in range(200):
        index.set_meta("filler", "y" * 10_000)
    check(index)


def test_after_fork_the_child_is_refused(index: Index, space: int) -> None:
    keys, records = stored(index, space, 2)
    child = os.fork()
    if child == 0:
        refused = 0
        for attempt in (lambda: index.publish("me", space, keys, records), index.segments):
            try:
                attempt()
            except StoreError as error:
                refused += "fork" in str(error)
        missed = (index.lookup(space, keys).records["slot"] == NO_SLOT).all()
        os._exit(0 if refused == 2 and missed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (index.lookup(space, keys).records == records).all()


def test_an_index_that_took_the_place_of_a_deleted_one_is_never_asked(index: Index, space: int) -> None:
    keys, records = stored(index, space, 4)
    for path in index.path.parent.glob("index.db*"):
        path.unlink()
    with contextlib.ExitStack() as busy:
        for _ in range(max(1, len(index._readers))):
            busy.enter_context(index._read("something else"))
        assert (index.lookup(space, keys).records["slot"] == NO_SLOT).all()
        assert not index.path.exists()
        new = open_index(index.path.parent)
        assert new.namespace_id(NAMESPACE) == space
        new.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
        slots = slots_of(new.lease("me", space, 4, EVER))
        assert new.publish("me", space, keys, new_records(slots)).all()
        assert (index.lookup(space, keys).records["slot"] == NO_SLOT).all()
    assert (index.lookup(space, keys).records == records).all()
    new.close()


def test_the_file_is_private(index: Index, space: int) -> None:
    stored(index, space, 1)
    for path in index.path.parent.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    path.write_bytes(secrets.token_bytes(8192))
    with pytest.raises(StoreError, match=r"index\.db"):
        Index(path)
    path.unlink()
    raw = sqlite3.connect(path)
    raw.execute("create table mine (a)")
    raw.close()
    with pytest.raises(ForeignStoreError, match="another program"):
        Index(path)
    path.unlink()
    (tmp_path / "real").touch()
    path.symlink_to(tmp_path / "real")
    with pytest.raises(StoreError, match="symbolic link"):
        Index(path)


def test_an_index_of_another_format_is_refused(index: Index) -> None:
    index._writer.execute(f"pragma user_version = {schema.FORMAT + 1}")
    with pytest.raises(ForeignStoreError, match="format"):
        Index(index.path)


def test_a_truncated_index_is_refused_or_served_without_raising(tmp_path: Path) -> None:
    whole = open_index(tmp_path)
    space = whole.namespace_id(NAMESPACE)
    whole.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    keys, records = stored(whole, space, SLOTS)
    whole.close()
    data = (tmp_path / "index.db").read_bytes()
    refused = 0
    for size in range(0, len(data), 4096 + 512):
        (tmp_path / "index.db").write_bytes(data[:size])
        try:
            cut = open_index(tmp_path)
        except StoreError:
            refused += 1
            continue
        found = cut.lookup(space, keys).records
        damaged = (found != records) & (found["slot"] != NO_SLOT)
        assert (found["root"] != records["root"])[damaged].all(), "a damaged record passes for a whole one"
        cut.close()
    assert refused


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(filesystem._NETWORK, filesystem._magic(tmp_path), "NFS")
    with pytest.raises(StoreError, match=r"NFS.*index_dir"):
        open_index(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_kernels_name_of_a_file_system_is_read() -> None:
    assert filesystem._magic(Path("/proc")) == 0x9FA0


def test_many_processes_create_one_index(tmp_path: Path) -> None:
    code = f"""
from prometheus_client import CollectorRegistry
from tutti_sglang.metrics import Metrics
from tutti_sglang.store.index import Index
from tutti_sglang.store.namespace import parse
from pathlib import Path
index = Index(Path({str(tmp_path)!r}) / "index.db", Metrics(CollectorRegistry()))
print(index.namespace_id(parse({NAMESPACE.readable()!r})))
"""
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(4)]
    assert {process.communicate(timeout=60)[0].strip() for process in running} == {b"1"}


_WRITER = """
import os, secrets, sys, time
import numpy as np
from pathlib import Path
from tutti_sglang.store.index import Index, RECORD_DTYPE
from tutti_sglang.store.slots import slots_of
index, owner = Index(Path(sys.argv[1])), secrets.token_hex(16)
print(owner, flush=True)
held = []
while True:
    slots = slots_of(index.lease(owner, 1, 8, index.epoch()))
    records = np.zeros(len(slots), RECORD_DTYPE)
    records["slot"], records["root"], records["generation"] = slots, slots * 7, 1
    keys = secrets.token_bytes(32 * len(slots))
    published = index.publish(owner, 1, keys, records)
    held += [(keys[i * 32 : i * 32 + 32], slots[i]) for i in np.flatnonzero(published)]
    for key, slot in held[:-8]:
        index.delete(1, key, np.array([slot]))
    held = held[-8:]
    index.give_back(owner, slots)
"""


def _writers(index: Index, count: int) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", _WRITER, str(index.path)]
    return [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(count)]


def _owner(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout
    return process.stdout.readline().decode().strip()


def test_killed_writers_lose_no_slot(index: Index, space: int) -> None:
    random = np.random.default_rng(7)
    for _ in range(4):
        running = _writers(index, 3)
        owners = [_owner(process) for process in running]
        for process in running:
            try:
                process.wait(random.uniform(0.02, 0.15))
            except subprocess.TimeoutExpired:
                process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()
        check(index)
        for owner in owners:
            index.reclaim(owner)
        assert index.usage().leased == 0
    index.clear(space)
    assert index.purge()
    assert len(slots_of(index.lease("me", space, SLOTS, EVER))) == SLOTS
    check(index)


def test_a_stopped_process_costs_others_at_most_failed_writes(index: Index, space: int) -> None:
    keys, records = stored(index, space, 4)
    mine = slots_of(index.lease("me", space, 8, EVER))
    index._writer.execute("pragma busy_timeout = 100")
    (process,) = _writers(index, 1)
    owner = _owner(process)
    random = np.random.default_rng(11)
    try:
        for slot in mine:
            os.kill(process.pid, signal.SIGSTOP)
            assert (index.lookup(space, keys).records == records).all()
            with contextlib.suppress(StoreError):
                index.publish("me", space, new_keys(1), new_records(np.array([slot])))
            os.kill(process.pid, signal.SIGCONT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(random.uniform(0.005, 0.03))
    finally:
        process.kill()
        process.communicate()
    index.reclaim(owner)
    check(index)
