"""Batches of one request share a look; what was remembered and has changed since costs a read, never a wrong byte."""

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tests.store.kit import Pages, config, get, keys, lookup, namespace, open_store, put, soon, value
from tutti_sglang.kernels import native
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import reader, remembered
from tutti_sglang.store.index import RECORD_DTYPE, Index
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.objects import ObjectStore
from tutti_sglang.store.remembered import Remembered
from tutti_sglang.store.sight import Sight


def sight_of(count: int) -> Sight:
    records = np.zeros(count, dtype=RECORD_DTYPE)
    records["slot"] = np.arange(count)
    return Sight(records, *(np.ones(count, np.bool_) for _ in range(3)))


def test_a_stretch_begins_with_the_keys_and_goes_on_as_the_request_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "STRETCH", 4)
    memory, request = Remembered(), keys(*range(10, 20))
    memory.expect(1, request)
    assert memory.stretch(1, keys(12, 13)) == keys(12, 13, 14, 15)
    assert memory.stretch(1, keys(18, 19)) == keys(18, 19)
    assert memory.stretch(1, keys(*range(10, 16))) == keys(*range(10, 16))
    assert memory.stretch(1, keys(13, 12)) == b""
    assert memory.stretch(2, keys(12, 13)) == b""


def test_what_a_look_saw_is_recalled_for_any_batch_of_it() -> None:
    memory = Remembered()
    memory.add(1, keys(*range(10)), sight_of(10), None)
    found = memory.recall(1, keys(3, 4, 5))
    assert found is not None
    assert found.sight.slots.tolist() == [3, 4, 5]
    assert (found.following, found.after.slots.tolist()) == (keys(6, 7, 8), [6, 7, 8])
    last = memory.recall(1, keys(7, 8))
    assert last is not None
    assert (last.following, last.after.slots.tolist()) == (keys(9), [9])
    assert memory.recall(1, keys(5, 4)) is None
    assert memory.recall(2, keys(3)) is None
    memory.forget()
    assert memory.recall(1, keys(3)) is None


def test_keys_are_found_at_their_own_place_alone() -> None:
    memory, both = Remembered(), secrets.token_bytes(KEY_SIZE) * 2
    shifted = both[5 : 5 + KEY_SIZE]
    memory.expect(1, both + shifted)
    assert memory.stretch(1, shifted) == shifted
    assert memory.stretch(1, both[7 : 7 + KEY_SIZE]) == b""


def test_an_old_look_is_not_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "SECONDS", -1.0)
    memory = Remembered()
    memory.add(1, keys(1), sight_of(1), None)
    assert memory.recall(1, keys(1)) is None


def test_many_batches_of_a_request_take_one_statement(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    assert all(put(store, ns, *range(30)))
    assert store.drain(8)
    statements = []
    asked = Index.lookup
    monkeypatch.setattr(Index, "lookup", lambda *args: statements.append(args) or asked(*args))
    assert lookup(store, ns, *range(30)) == [True] * 30
    for start in range(0, 30, 5):
        assert all(get(store, ns, *range(start, start + 5)))
    assert len(statements) == 1
    assert value(store, "tutti_hit_objects", tier="drive") == 30
    assert store.close()


def test_slots_that_were_reused_meanwhile_give_no_wrong_byte(disk: Path) -> None:
    """Two processes: the first remembers, the second takes the objects away and puts others into their slots."""
    first, second = open_store(disk, max_size=2 << 20), open_store(disk, max_size=2 << 20)
    ns, same = first.attach(namespace()), second.attach(namespace())
    assert all(put(first, ns, *range(20)))
    assert first.drain(8)
    assert lookup(first, ns, *range(20)) == [True] * 20
    assert all(get(first, ns, *range(5))), "the look is for all of the request"
    second.clear(same)
    for number in range(100, 200, 20):
        put(second, same, *range(number, number + 20))
        assert second.drain(8)
    assert get(first, ns, *range(5, 20)) == [False] * 15
    assert value(first, "tutti_missed_objects", reason="absent") == 15
    assert value(first, "tutti_missed_objects", reason="checksum") == 0
    assert first.close()
    assert second.close()


def test_without_checksums_nothing_is_remembered_beyond_a_commit(disk: Path) -> None:
    store, other = open_store(disk, checksum="off"), open_store(disk, checksum="off")
    ns = store.attach(namespace())
    assert all(put(store, ns, *range(10)))
    assert store.drain(8)
    assert all(lookup(store, ns, *range(10)))
    assert all(get(store, ns, *range(5)))
    other.clear(other.attach(namespace()))
    pages = Pages(5)
    assert store.get(ns, keys(*range(5, 10)), pages.rows, soon()).tolist() == [False] * 5
    assert store.close()
    assert other.close()


def test_without_checksums_a_commit_while_the_drives_read_has_it_read_again(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process puts other objects into the slots while they are being read."""
    store, other = (
        open_store(disk, checksum="off", max_size=2 << 20),
        open_store(disk, checksum="off", max_size=2 << 20),
    )
    ns, same = store.attach(namespace()), other.attach(namespace())
    assert all(put(store, ns, *range(20)))
    assert store.drain(8)
    assert all(lookup(store, ns, *range(20)))
    assert all(get(store, ns, *range(5)))
    read, meanwhile = store._getter._reader.read, []

    def slowly(*args: Any) -> Any:
        if not meanwhile:
            meanwhile.append(other.clear(same))
            for number in range(100, 200, 20):
                put(other, same, *range(number, number + 20))
                assert other.drain(8)
        return read(*args)

    monkeypatch.setattr(store._getter._reader, "read", slowly)
    assert get(store, ns, *range(5, 20)) == [False] * 15
    assert meanwhile
    assert store.close()
    assert other.close()


@pytest.mark.parametrize("size", ["whole blocks", "less"])
def test_without_checksums_large_reads_are_not_copied_where_blocks_fit(
    disk: Path, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "STRAIGHT_BYTES", 1)
    tensors = (8192, 4096) if size == "whole blocks" else (8192, 4000)
    store = ObjectStore(config(disk, checksum="off", engine="auto"), metrics=Metrics(CollectorRegistry()))
    ns = store.attach(namespace(tensors=tensors))
    assert all(put(store, ns, *range(20), tensors=tensors))
    assert store.drain(8)
    asked = []
    original = reader.read
    monkeypatch.setattr(
        reader, "read", lambda engine, request, *more: asked.append(request) or original(engine, request, *more)
    )
    assert all(get(store, ns, *range(20), tensors=tensors))
    assert all(lookup(store, ns, *range(20)))
    assert all(get(store, ns, *range(10), tensors=tensors))
    straight = size == "whole blocks" and native.library() is not None
    assert len(asked) >= 2, "and once more after a commit beside it"
    assert {each.straight for each in asked} == {straight}
    assert store.close()
