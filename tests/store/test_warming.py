"""What the first get would wait for is done before it, beside whoever attaches, and harms nobody when it fails."""

import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.store.kit import MIB, close_good, config, eventually, get, namespace, put, store_pages, value
from tutti_sglang.engine.uring import UringEngine, uring_refused
from tutti_sglang.kernels import native
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import segments, warming
from tutti_sglang.store.objects import ObjectStore

if native.library() is None:
    pytest.skip(native.unavailable_reason(), allow_module_level=True)


def open_store(*drives: Path) -> ObjectStore:
    return ObjectStore(config(*drives, engine="uring"), metrics=Metrics(CollectorRegistry()))


def reopened(*drives: Path, model: str = "m") -> tuple[ObjectStore, int]:
    """A store in which there are pages of a model, as a process that begins finds it."""
    first = open_store(*drives)
    store_pages(first, first.attach(namespace(model)), *range(8))
    assert first.close()
    store = open_store(*drives)
    return store, store.attach(namespace())


def engine(store: ObjectStore) -> UringEngine:
    found = store._parts.engine
    assert isinstance(found, UringEngine)
    return found


def drives_with_files(store: ObjectStore) -> set[int]:
    table = store._parts.segments._table.values()
    return {drive for segment in table if segment.open for drive in segment.files}


@pytest.mark.skipif(bool(uring_refused()), reason=uring_refused())
@pytest.mark.parametrize("model", ["m", "another"])
def test_each_drive_has_its_ring_and_staging_is_registered_before_any_get(disk: Path, model: str) -> None:
    store, ns = reopened(disk / "a", disk / "b", model=model)
    assert not drives_with_files(store)
    assert engine(store).registered == 0
    store.warm(ns)
    assert eventually(lambda: engine(store).registered == 8 * MIB)
    assert eventually(lambda: drives_with_files(store) == {0, 1})
    assert engine(store).counters.transfers == 0
    assert all(get(store, ns, *range(8))) == (model == "m")
    close_good(store)


def test_an_empty_store_needs_nothing(disk: Path) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store.warm(ns)
    assert all(put(store, ns, *range(8)))
    assert all(get(store, ns, *range(8)))
    close_good(store)


def test_who_asks_for_it_waits_for_no_file(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ns = reopened(disk)
    entered, gate, real = threading.Event(), threading.Event(), segments.open_file

    def held_up(*arguments: Any) -> int:
        entered.set()
        assert gate.wait(60)
        return real(*arguments)

    monkeypatch.setattr(segments, "open_file", held_up)
    store.warm(ns)
    assert entered.wait(60)
    assert not drives_with_files(store)
    gate.set()
    assert eventually(lambda: drives_with_files(store) == {0})
    close_good(store)


def test_a_file_that_is_gone_is_no_error_here(disk: Path) -> None:
    store, ns = reopened(disk)
    for path in disk.rglob("*.seg"):
        path.unlink()
    store.warm(ns)
    assert not any(get(store, ns, *range(8)))
    assert eventually(lambda: all(put(store, ns, *range(8))) and store.drain(8) and all(get(store, ns, *range(8))))
    assert value(store, "tutti_call_errors") == 0
    assert store.close()


def test_a_failure_of_any_kind_reaches_nobody(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a bug")

    store, ns = reopened(disk)
    monkeypatch.setattr(warming, "spot", fails)
    store.warm(ns)
    assert eventually(lambda: value(store, "tutti_call_errors", call="writer") == 1)
    assert all(get(store, ns, *range(8)))
    assert store.close()
