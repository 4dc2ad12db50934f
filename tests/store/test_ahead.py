"""The next batch of a request is on its way before it is asked for; what nobody asks for gives its memory back, and
neither faults nor changes make a wrong byte of it."""

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.store.kit import Pages, config, eventually, get, keys, lookup, namespace, put, soon, value
from tutti_sglang.engine.batch import IN_PROGRESS
from tutti_sglang.kernels import native
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import ahead
from tutti_sglang.store.objects import ObjectStore

if native.library() is None:
    pytest.skip(native.unavailable_reason(), allow_module_level=True)

BATCH = 5


def open_store(disk: Path, engine: str = "uring", **changes: Any) -> ObjectStore:
    return ObjectStore(config(disk, engine=engine, **changes), metrics=Metrics(CollectorRegistry()))


def filled(store: ObjectStore, count: int) -> int:
    ns = store.attach(namespace())
    assert all(put(store, ns, *range(count)))
    assert store.drain(8)
    assert all(lookup(store, ns, *range(count)))
    return ns


def batches(store: ObjectStore, outcome: str) -> float:
    return value(store, "tutti_ahead_batches", outcome=outcome)


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_each_batch_but_the_first_is_read_ahead_by_engines_that_can(disk: Path, engine: str) -> None:
    store = open_store(disk, engine=engine)
    ns = filled(store, 30)
    for start in range(0, 30, BATCH):
        assert all(get(store, ns, *range(start, start + BATCH)))
    expected = 5 if engine == "uring" else 0
    assert batches(store, "begun") == batches(store, "used") == expected
    assert value(store, "tutti_hit_objects", tier="drive") == 30
    assert store.close()


def test_a_shorter_or_another_batch_is_read_all_the_same(disk: Path) -> None:
    store = open_store(disk)
    ns = filled(store, 30)
    assert all(get(store, ns, *range(BATCH)))
    assert all(get(store, ns, *range(BATCH, BATCH + 2)))
    assert all(get(store, ns, *range(20, 20 + BATCH)))
    assert batches(store, "used") == 0
    assert store.close()


def test_what_nobody_asks_for_gives_its_memory_back(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SECONDS", 0.1)
    store = open_store(disk)
    ns = filled(store, 30)
    used = store._parts.staging.used
    assert all(get(store, ns, *range(BATCH)))
    assert store._parts.staging.used > used
    assert eventually(lambda: store._parts.staging.used == used)
    assert all(get(store, ns, *range(BATCH, 2 * BATCH)))
    assert store.close()


def test_few_batches_are_kept_and_the_oldest_makes_way(disk: Path) -> None:
    store = open_store(disk)
    ns = filled(store, 90)
    for start in (0, 30, 60):
        assert all(get(store, ns, *range(start, start + BATCH)))
    assert batches(store, "begun") == 3
    assert all(get(store, ns, *range(BATCH, 2 * BATCH)))
    assert batches(store, "used") == 0
    assert store.close()


def test_what_was_cleared_is_not_delivered_although_it_was_read(disk: Path) -> None:
    store = open_store(disk)
    ns = filled(store, 30)
    assert all(get(store, ns, *range(BATCH)))
    store.clear(ns)
    assert not any(get(store, ns, *range(BATCH, 2 * BATCH)))
    assert store.close()


def test_closing_waits_for_nobody_who_would_ask(disk: Path) -> None:
    store = open_store(disk)
    ns = filled(store, 30)
    assert all(get(store, ns, *range(BATCH)))
    assert store.close()
    assert not store._parts.staging._held


def test_bytes_that_changed_on_the_drive_are_a_miss_when_read_ahead(disk: Path) -> None:
    store = open_store(disk)
    ns = filled(store, 30)
    for path in disk.rglob("*.seg"):
        spoiled = bytearray(path.read_bytes())
        for at in range(0, len(spoiled), 4096):
            spoiled[at] ^= 1
        path.write_bytes(spoiled)
    for start in range(0, 15, BATCH):
        assert not any(get(store, ns, *range(start, start + BATCH)))
    assert value(store, "tutti_missed_objects", reason="checksum") == 15
    assert store.close()


def test_without_checksums_what_was_read_ahead_is_not_believed_beyond_a_commit(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots belong to other objects while it is read, and to it again when it is asked for."""
    store, other = open_store(disk, checksum="off"), open_store(disk, checksum="off")
    ns, same = filled(store, 10), other.attach(namespace())
    (path,) = disk.rglob("*.seg")
    reader, meanwhile = store._getter._reader, []
    own, read = path.read_bytes(), reader.read

    def slowly(*args: Any) -> Any:
        if meanwhile or args[1] is None:
            return read(*args)
        meanwhile.append(put(other, same, 100))
        assert other.drain(8)
        now = path.read_bytes()
        overwrite(path, bytes(len(own)))
        found = read(*args)
        (kept,) = reader.ahead._kept
        for ticket in kept.begun.tickets.values():
            assert not (store._parts.engine.wait(ticket, 8) == IN_PROGRESS).any()
        overwrite(path, now)
        return found

    monkeypatch.setattr(reader, "read", slowly)
    assert all(get(store, ns, *range(BATCH)))
    assert meanwhile == [[True]]
    assert all(get(store, ns, *range(BATCH, 2 * BATCH)))
    assert batches(store, "begun") > 0
    assert store.close()
    assert other.close()


def overwrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


def test_the_rows_of_a_batch_are_written_by_the_call_that_names_them_alone(disk: Path) -> None:
    store = open_store(disk)
    ns = filled(store, 30)
    pages = Pages(2 * BATCH)
    assert store.get(ns, keys(*range(BATCH)), pages.rows[:BATCH], soon()).all()
    time.sleep(0.05)
    assert not pages.bytes[BATCH:].any()
    assert store.get(ns, keys(*range(BATCH, 2 * BATCH)), pages.rows[BATCH:], soon()).all()
    assert pages.bytes[BATCH:].any()
    assert store.close()
