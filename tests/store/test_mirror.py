"""An index that keeps a table in memory answers as one without, whatever others do to it."""

import math
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.store.index_kit import EVER, GROUP, NAMESPACE, check, new_keys, open_index, stored
from tutti_sglang.geometry import Stripe
from tutti_sglang.store import allocation, mirror
from tutti_sglang.store.index import Index
from tutti_sglang.store.keys import KEY_SIZE, split
from tutti_sglang.store.slots import NO_SLOT
from tutti_sglang.store.table import Table


def open_mirrored(path: Path) -> Index:
    opened = open_index(path)
    opened.mirror(math.inf)
    assert opened.table
    return opened


def filled(path: Path, objects: int = 0) -> tuple[Index, int]:
    index = open_index(path)
    space = index.namespace_id(NAMESPACE)
    index.add_segment(space, (0,), GROUP, 4096, Stripe.TENSOR)
    if objects:
        stored(index, space, objects)
    return index, space


def assert_equal(one: Index, other: Index, space: int, keys: bytes) -> None:
    found, right = one.lookup(space, keys), other.lookup(space, keys)
    assert (found.records == right.records).all()
    assert found.epoch == right.epoch
    assert (one.locate(space, keys) == other.locate(space, keys)).all()


def test_what_another_process_changes_is_seen_at_the_next_look(tmp_path: Path) -> None:
    other, space = filled(tmp_path, 50)
    mirrored, rng = open_mirrored(tmp_path), random.Random(1)
    known: list[tuple[bytes, int]] = []
    for _ in range(60):
        keys, records = stored(other, space, rng.randint(1, 20))
        known += zip(split(keys), records["slot"].tolist(), strict=True)
        gone = [known.pop(rng.randrange(len(known))) for _ in range(rng.randint(0, len(known) // 2))]
        slots = np.array([slot for _, slot in gone], dtype=np.int64)
        other.delete(space, b"".join(key for key, _ in gone), slots)
        other.settle(EVER)
        assert (mirrored.locate(space, b"".join(key for key, _ in gone)) == NO_SLOT).all()
        asked = [key for key, _ in known + gone]
        rng.shuffle(asked)
        assert_equal(mirrored, other, space, b"".join(asked) + new_keys(3))
        if rng.random() < 0.3:
            mirrored.mirror(math.inf)
    assert mirrored.table
    mirrored.close()
    check(other)
    other.close()


def test_a_key_that_moves_is_found_where_it_is(tmp_path: Path) -> None:
    other, space = filled(tmp_path)
    mirrored = open_mirrored(tmp_path)
    keys, records = stored(other, space, 8)
    assert_equal(mirrored, other, space, keys)
    slots = records["slot"].astype(np.int64)
    other.delete(space, keys, slots)
    lease = other.lease("me", space, 8, 0)  # not the slots that were freed
    records["slot"], records["generation"] = np.arange(lease[0, 0], lease[0, 0] + 8), 99
    assert other.publish("me", space, keys, records).all()
    assert (mirrored.lookup(space, keys).records == records).all()
    for each in (mirrored, other):
        each.close()


def test_who_missed_too_much_asks_the_tree_and_loads_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "CHANGES_KEPT", 100)
    monkeypatch.setattr(allocation, "_FORGET", allocation._FORGET.replace(str(1 << 16), "100"))
    other, space = filled(tmp_path)
    mirrored = open_mirrored(tmp_path)
    old = mirrored.table
    keys = b"".join(stored(other, space, 100)[0] for _ in range(5))
    assert_equal(mirrored, other, space, keys)
    mirrored.mirror(math.inf)
    assert mirrored.table
    assert mirrored.table is not old
    assert_equal(mirrored, other, space, keys)
    for each in (mirrored, other):
        each.close()


def test_the_latest_changes_are_kept_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_FORGET", allocation._FORGET.replace(str(1 << 16), "100"))
    index, space = filled(tmp_path)
    for _ in range(12):
        keys, records = stored(index, space, 50)
        index.delete(space, keys, records["slot"].astype(np.int64))
        index.settle(EVER)
        count, first, last = index._writer.execute("select count(*), min(id), max(id) from changes").fetchone()
        assert count == last - first + 1
        assert count <= 101
    assert count >= 100
    index.close()


def test_more_news_than_a_look_takes_is_answered_by_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, space = filled(tmp_path)
    mirrored = open_mirrored(tmp_path)
    keys = stored(other, space, 3000)[0] + stored(other, space, 1000)[0]
    other.clear(space)
    while other.purge():
        pass
    keys += stored(other, space, 500)[0]
    table = mirrored.table
    assert_equal(mirrored, other, space, keys)
    assert mirrored.table is table, "it catches up, look by look"
    assert_equal(mirrored, other, space, keys)
    assert mirrored.locate(space, keys)[-1] != NO_SLOT
    for each in (mirrored, other):
        each.close()


def test_a_table_that_is_loaded_while_objects_come_and_go_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "_PIECE", 16)
    monkeypatch.setattr(mirror, "_OBJECTS", mirror._OBJECTS.replace("limit 8192", "limit 16"))
    other, space = filled(tmp_path)
    batches = [stored(other, space, 20) for _ in range(20)]
    mirrored, number = open_index(tmp_path), 0
    while not mirrored.table:
        mirrored.mirror(0)
        keys, records = batches[number]
        other.delete(space, keys, records["slot"].astype(np.int64))
        batches.append(stored(other, space, 10))
        number += 1
    assert number > 5
    assert_equal(mirrored, other, space, b"".join(keys for keys, _ in batches))
    assert mirrored.table
    for each in (mirrored, other):
        each.close()


def test_a_store_of_too_many_objects_is_served_by_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "OBJECTS_MAX", 100)
    monkeypatch.setattr(mirror, "_PIECE", 16)
    monkeypatch.setattr(mirror, "_OBJECTS", mirror._OBJECTS.replace("limit 8192", "limit 16"))
    index, space = filled(tmp_path)
    keys, records = stored(index, space, 200)
    for _ in range(3):
        index.mirror(math.inf)
    assert index.table is None
    assert (index.lookup(space, keys).records == records).all()
    index.close()


def test_looks_from_many_threads_beside_a_writer_say_what_is_there(tmp_path: Path) -> None:
    other, space = filled(tmp_path)
    mirrored = open_mirrored(tmp_path)
    steady, records = stored(other, space, 64)
    wrong: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            same = (mirrored.locate(space, steady) == records["slot"].astype(np.int64)).all()
            if not same or (mirrored.lookup(space, steady).records != records).any():
                wrong.append("a look")

    def keep_up() -> None:
        while not done.is_set():
            mirrored.mirror(0)

    threads = [threading.Thread(target=act) for act in (look, look, look, keep_up)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        keys, gone = stored(other, space, 20)
        assert (mirrored.locate(space, keys) != NO_SLOT).all()
        other.delete(space, keys, gone["slot"].astype(np.int64))
        assert (mirrored.locate(space, keys) == NO_SLOT).all()
        other.settle(EVER)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    for each in (mirrored, other):
        each.close()


def test_nonsense_among_the_changes_costs_no_more_than_what_it_is_about(tmp_path: Path) -> None:
    other, space = filled(tmp_path)
    mirrored = open_mirrored(tmp_path)
    keys, records = stored(other, space, 12)
    for spoiler in ("slot = 'x'", "mark = x'00ff'", "mark = 1e300", "slot = -7", "mark = 'ä'", "slot = zeroblob(9)"):
        other._writer.execute(f"update changes set {spoiler} where id = (select max(id) from changes)")
        found = mirrored.lookup(space, keys).records
        assert (found[:-1] == records[:-1]).all()
        assert found[-1] == records[-1] or found["slot"][-1] == NO_SLOT
        mirrored.close()
        mirrored = open_mirrored(tmp_path)
        assert (mirrored.lookup(space, keys).records == records).all()
    assert mirrored._metrics.value("tutti_index_errors") == 0
    assert len(keys) == 12 * KEY_SIZE
    for each in (mirrored, other):
        each.close()


@pytest.mark.parametrize("mark", ["1.5", "'1,2,3'", "x'312c32'", "'ä'", "-1e300"])
def test_nonsense_among_the_marks_costs_its_object_alone(tmp_path: Path, mark: str) -> None:
    other, space = filled(tmp_path)
    keys, records = stored(other, space, 40)
    slots = records["slot"].astype(np.int64)
    other._writer.execute(f"update objects set mark = {mark} where slot = ?", (int(slots[0]),))
    mirrored = open_mirrored(tmp_path)
    assert (mirrored.locate(space, keys) == [NO_SLOT, *slots[1:]]).all()
    assert (mirrored.lookup(space, keys).records[1:] == records[1:]).all()
    mirrored.close()
    other.close()


def statements(index: Index) -> list[str]:
    """What the connections for readers are asked from now on."""
    asked: list[str] = []
    for connection in index._readers:
        connection.set_trace_callback(asked.append)
    return asked


def looked_at(path: Path) -> tuple[Index, Index, int, bytes, np.ndarray]:
    """An index with 20 objects, the same with a table that has looked at them, space, keys and slots."""
    other, space = filled(path)
    keys, records = stored(other, space, 20)
    mirrored, slots = open_mirrored(path), records["slot"].astype(np.int64)
    assert (mirrored.locate(space, keys) == slots).all()
    return other, mirrored, space, keys, slots


def test_where_nothing_was_changed_nobody_asks_again_and_every_change_is_seen(tmp_path: Path) -> None:
    other, mirrored, space, keys, slots = looked_at(tmp_path)
    asked = statements(mirrored)
    for _ in range(5):
        assert (mirrored.locate(space, keys + new_keys(2)) == [*slots, NO_SLOT, NO_SLOT]).all()
    assert not asked
    other.delete(space, keys[:KEY_SIZE], slots[:1])
    assert (mirrored.locate(space, keys) == [NO_SLOT, *slots[1:]]).all()
    assert asked
    more, added = stored(other, space, 5)
    assert (mirrored.locate(space, more) == added["slot"].astype(np.int64)).all()
    other.clear(space)
    assert (mirrored.locate(space, keys + more) == NO_SLOT).all()
    asked.clear()
    assert (mirrored.locate(space, keys + more) == NO_SLOT).all()
    assert not asked


def test_a_table_that_was_made_anew_during_a_look_is_not_taken_for_what_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, mirrored, space, keys, slots = looked_at(tmp_path)
    merged = Table.merged

    def meanwhile(old: Table) -> Table:
        new = merged(old)
        other.delete(space, keys[:KEY_SIZE], slots[:1])
        assert mirrored.locate(space, keys)[0] == NO_SLOT
        return new

    monkeypatch.setattr("tutti_sglang.store.table.MERGE_AT", 1)
    monkeypatch.setattr(Table, "merged", meanwhile)
    stored(other, space, 2)
    before = mirrored.table
    mirrored.mirror(0)
    assert mirrored.table is not before
    for _ in range(2):
        assert (mirrored.locate(space, keys) == [NO_SLOT, *slots[1:]]).all()
    mirrored.close()
    other.close()


def test_who_puts_asks_only_now_and_then_but_knows_its_own_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "LATELY", 1000.0)
    other, mirrored, space, keys, slots = looked_at(tmp_path)
    asked = statements(mirrored)
    other.delete(space, keys[:KEY_SIZE], slots[:1])
    assert (mirrored.locate(space, keys, lately=True) == slots).all()
    assert not asked
    own, added = stored(mirrored, space, 3)
    assert (mirrored.locate(space, own, lately=True) == added["slot"].astype(np.int64)).all()
    mirrored.delete(space, own, added["slot"].astype(np.int64))
    assert (mirrored.locate(space, own + keys, lately=True) == [*[NO_SLOT] * 4, *slots[1:]]).all()
    assert stored(mirrored, space, 2)
    mirrored.clear(space)
    assert (mirrored.locate(space, keys, lately=True) == NO_SLOT).all()
