"""Keys and records: the index tells the truth about objects, to all processes."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.store.index_kit import EVER, GROUP, NAMESPACE, OTHER, SLOTS, check, new_keys, new_records, open_index, stored
from tutti_sglang.geometry import Stripe
from tutti_sglang.store import audit
from tutti_sglang.store.index import RECORD_DTYPE, Index
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.slots import NO_SLOT, slots_of


@pytest.fixture(params=["by the table", "by the B-tree"])
def index(index: Index, request: pytest.FixtureRequest) -> Index:
    """Both ways to look keys up."""
    if request.param == "by the B-tree":
        index.table = None
    return index


def test_what_was_published_is_found_in_the_order_of_the_keys(index: Index, space: int) -> None:
    keys, records = stored(index, space, 20)
    split = [keys[i : i + KEY_SIZE] for i in range(0, len(keys), KEY_SIZE)]
    order = np.random.default_rng(1).permutation(20)
    found = index.lookup(space, b"".join(split[i] for i in order) + new_keys(1) + split[7] * 2)
    assert (found.records[:20] == records[order]).all()
    assert found.records["slot"][20] == NO_SLOT
    assert (found.records[21:] == records[7]).all()
    assert found.records.dtype == RECORD_DTYPE


def test_many_keys_come_back_in_the_order_they_were_asked_in(index: Index, space: int) -> None:
    index.add_segment(space, (0,), GROUP, 2000, Stripe.TENSOR)
    keys, records = stored(index, space, 1500)
    split = np.frombuffer(keys, np.uint8).reshape(-1, KEY_SIZE)
    order = np.random.default_rng(2).integers(0, 1500, 3000)  # with repetitions
    asked = np.concatenate([split[order], np.frombuffer(new_keys(100), np.uint8).reshape(-1, KEY_SIZE)])
    found = index.lookup(space, asked.tobytes()).records
    assert (found[:3000] == records[order]).all()
    assert (found["slot"][3000:] == NO_SLOT).all()


def test_no_keys_no_records(index: Index, space: int) -> None:
    assert len(index.lookup(space, b"").records) == 0
    assert len(index.publish("me", space, b"", new_records(np.empty(0, np.int64)))) == 0
    assert index.delete(space, b"", np.empty(0, np.int64)).tolist() == []


def test_a_key_of_another_namespace_is_not_found(index: Index, space: int) -> None:
    keys, _ = stored(index, space, 3)
    other = index.namespace_id(OTHER)
    assert other != space
    assert (index.lookup(other, keys).records["slot"] == NO_SLOT).all()
    assert index.namespace_id(NAMESPACE) == space


def test_each_batch_is_one_statement(index: Index, space: int) -> None:
    slots = slots_of(index.lease("me", space, 8, EVER))
    keys, seen = new_keys(8), list[str]()
    index._writer.set_trace_callback(seen.append)
    index.publish("me", space, keys, new_records(slots))
    assert len(set(seen)) == 1  # its triggers show up under the same text
    for connection in index._readers:
        connection.set_trace_callback(seen.append)
    for look in (index.locate, index.lookup):
        seen.clear()
        look(space, keys)
        assert len(seen) == 1


def test_batches_are_cut_from_bytes_and_never_from_text(index: Index, space: int) -> None:
    """In a text SQLite counts characters from its start for every piece: 2,048 objects took 30 ms instead of 7."""
    slots = slots_of(index.lease("me", space, 8, EVER))
    keys, seen = new_keys(8), list[str]()
    for connection in (index._writer, *index._readers):
        connection.set_trace_callback(seen.append)
    assert index.publish("me", space, keys, new_records(slots)).all()
    index.lookup(space, keys)
    assert index.delete(space, keys, slots).all()
    cut = [argument for text in seen for argument in re.findall(r"substr\((..)", text)]
    assert len(cut) >= 5
    assert set(cut) == {"x'"}


def test_the_first_publisher_of_a_key_wins_and_the_slot_of_the_other_stays_its_own(index: Index, space: int) -> None:
    keys, first = stored(index, space, 4)
    slots = slots_of(index.lease("you", space, 8, EVER))
    keys += new_keys(1)
    second = new_records(slots[:5])
    assert index.publish("you", space, keys, second).tolist() == [False] * 4 + [True]
    assert (index.lookup(space, keys).records == np.concatenate([first, second[4:]])).all()
    assert index.give_back("you", slots) == len(slots) - 1
    check(index)


def test_a_key_twice_in_a_batch_is_published_once(index: Index, space: int) -> None:
    slots = slots_of(index.lease("me", space, 4, EVER))
    assert index.publish("me", space, new_keys(1) * 4, new_records(slots)).tolist() == [True, False, False, False]
    check(index)


def test_a_publish_that_is_repeated_is_true_again(index: Index, space: int) -> None:
    keys, records = stored(index, space, 4)
    assert index.publish("me", space, keys, records).all()


def test_delete_needs_key_and_slot(index: Index, space: int) -> None:
    keys, records = stored(index, space, 4)
    slots = records["slot"].astype(np.int64)
    before = index.epoch()
    assert index.delete(space, keys, slots[[0, 2, 1, 3]]).tolist() == [True, False, False, True]
    assert (index.lookup(space, keys).records["slot"] == NO_SLOT).tolist() == [True, False, False, True]
    assert index.epoch() > before
    assert index.delete(space, keys, slots).tolist() == [False, True, True, False]
    check(index)


def test_clear_takes_one_namespace_out_of_sight_at_once(index: Index, space: int, tmp_path: Path) -> None:
    other, second = index.namespace_id(OTHER), open_index(tmp_path)
    index.add_segment(other, (0,), GROUP, SLOTS, Stripe.TENSOR)
    gone, _ = stored(index, space, 9)
    keys, records = stored(index, other, 5)
    assert index.clear(space) == 9
    for each in (index, second):
        assert (each.lookup(space, gone).records["slot"] == NO_SLOT).all()
        assert (each.locate(space, gone) == NO_SLOT).all()
        assert (each.lookup(other, keys).records == records).all()
    assert index.clear(space) == 0
    check(index)
    while second.purge():
        pass
    assert index.usage(space).used == 0
    index.reclaim("me")
    assert len(slots_of(index.lease("me", space, SLOTS, EVER))) == SLOTS
    assert (index.lookup(other, keys).records == records).all()
    second.close()
    check(index)


def test_what_is_published_while_its_segment_is_cleared_is_refused(index: Index, space: int) -> None:
    """It would be out of sight, and deleted."""
    stored(index, space, 4)
    slots = slots_of(index.lease("me", space, 4, EVER))
    index.clear(space)
    assert not index.publish("me", space, new_keys(4), new_records(slots)).any()
    assert index.give_back("me", slots) == 4
    assert len(index.lease("me", space, 4, EVER)) == 0
    while index.purge():
        pass
    stored(index, space, 4)
    check(index)


def test_a_cleared_namespace_of_many_segments_is_purged_piece_by_piece(index: Index, space: int) -> None:
    for _ in range(3):
        index.add_segment(space, (0,), GROUP, 6000, Stripe.TENSOR)
    stored(index, space, 15000)
    assert index.clear(space) == 15000
    pieces = [index.usage(space).used]
    while index.purge():
        pieces.append(index.usage(space).used)
    assert pieces[-1] == 0
    assert max(-np.diff(pieces)) <= 4096
    check(index)


@pytest.mark.parametrize(
    "spoiler",
    ["record = substr(record, 1, 7)", "record = x''", "record = 'text'", "record = 7", "record = zeroblob(32)",
     "record = record || x'00'", "record = 'ä' || substr(cast(record as text), 2)", "id = substr(id, 1, 9)",
     "id = 'ä'", "id = 5", "mark = mark + 1"],
)  # fmt: skip
def test_a_damaged_row_is_a_miss_of_that_row_alone(index: Index, space: int, spoiler: str) -> None:
    keys, records = stored(index, space, 12)
    bad = int(records["slot"][5])
    index._writer.execute(f"update objects set {spoiler} where slot = ?", (bad,))
    found = index.lookup(space, keys)
    assert (found.records["slot"] == NO_SLOT).tolist() == [n == 5 for n in range(12)]
    assert (np.delete(found.records, 5) == np.delete(records, 5)).all()
    assert set(found.damaged.tolist()) <= {bad, NO_SLOT}
    assert (np.delete(index.locate(space, keys), 5) == np.delete(records["slot"], 5).astype(np.int64)).all()
    occupants = index.occupants(0, NO_SLOT)
    assert set(records["slot"].tolist()) - set(occupants.records["slot"].tolist()) <= {bad}
    (seen,) = audit.objects(index.path, index.namespaces(), space)
    assert seen.broken.tolist() == [bad]
    assert (seen.batches[0].records == np.delete(records, 5)).all()
    assert index.remove(seen.broken) == 1
    assert index._metrics.value("tutti_index_errors") == 0
    check(index)


def test_all_is_there_after_reopening(tmp_path: Path) -> None:
    first = open_index(tmp_path)
    space = first.namespace_id(NAMESPACE)
    first.add_segment(space, (0, 0, 1), GROUP, SLOTS, Stripe.OBJECT)
    first.set_meta("store", "abc")
    keys, records = stored(first, space, 5)
    rows = first.segments()
    first.close()
    second = open_index(tmp_path)
    assert (second.lookup(space, keys).records == records).all()
    assert (second.segments(), second.meta("store"), second.meta("none")) == (rows, "abc", None)
    assert rows[0].cycle == (0, 0, 1)
    assert second.namespaces()[space].tensors == NAMESPACE.tensors
    check(second)
    second.close()


def test_a_namespace_of_another_format_is_listed_with_its_size(index: Index) -> None:
    index.namespace_id(NAMESPACE)
    text = '{"tensors": [4096], "format": 9, "new": true}'
    index._writer.execute("insert into namespaces (digest, readable, created) values (x'00', ?, 0)", (text,))
    assert index.namespaces()[2].tensors == (4096,)
    assert index.usage(2).slots == 0


def test_a_lookup_that_fails_is_counted_and_finds_nothing(index: Index, space: int) -> None:
    keys, _ = stored(index, space, 4)
    index._writer.execute("alter table objects rename to lost")
    assert (index.lookup(space, keys).records["slot"] == NO_SLOT).all()
    assert index._metrics.value("tutti_index_errors", op="lookup") == 1
    index._writer.execute("alter table lost rename to objects")
    assert (index.lookup(space, keys).records["slot"] != NO_SLOT).all()
