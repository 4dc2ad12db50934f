"""The index tells the truth about objects and slots, to all processes, whatever one of them does."""

import contextlib
import itertools
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry

from tutti_sglang.errors import ForeignStoreError, StoreError
from tutti_sglang.geometry import Stripe
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import filesystem, schema
from tutti_sglang.store.index import KEY_SIZE, RECORD_DTYPE, Index, Records
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.slots import NO_SLOT, Slots, slots_of

ROOT = Path(__file__).parents[2]
NAMESPACE = Namespace(model="m", weights="w", dtype="bfloat16", page_size=64, tensors=(4096,) * 4, layers=(0, 2))
OTHER = Namespace(model="other", weights="w", dtype="bfloat16", page_size=64, tensors=(4096,) * 4, layers=(0, 2))
GROUP, SLOTS = 4, 64
EVER = 1 << 62
"""An oldest epoch that every freed slot has passed."""


def _open(path: Path) -> Index:
    return Index(path / "index.db", Metrics(CollectorRegistry()))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = _open(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def space(index: Index) -> int:
    number = index.namespace_id(NAMESPACE)
    index.add_segment(number, (0, 1), GROUP, SLOTS, Stripe.TENSOR)
    return number


def _records(slots: Slots) -> Records:
    records = np.zeros(len(slots), dtype=RECORD_DTYPE)
    records["slot"] = slots
    records["generation"] = secrets.randbits(64)
    records["depth"] = np.arange(len(slots))
    records["bytes"] = 1 << 20
    records["created"] = (1 << 63) + 5
    records["root"] = [secrets.randbits(64) for _ in slots]
    return records


def _keys(count: int) -> bytes:
    return secrets.token_bytes(count * KEY_SIZE)


def _stored(index: Index, space: int, count: int, owner: str = "me") -> tuple[bytes, Records]:
    slots = slots_of(index.lease(owner, space, count, EVER))[:count]
    keys, records = _keys(count), _records(slots)
    assert index.publish(owner, space, keys, records).all()
    return keys, records


def _check(index: Index) -> None:
    """Each slot of each segment is free, leased, settling or holds one object."""
    raw = sqlite3.connect(index.path)
    states: list[int] = []
    for segment, slots, bits, count in raw.execute(
        "select id, slots, bits, count from segments join free on segment = id"
    ):
        free = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=slots))
        assert len(free) == count
        states += ((segment << 24) + free).tolist()
    for table in ("leased", "settling", "objects"):
        states += [slot for (slot,) in raw.execute(f"select slot from {table}")]
    every = [(i << 24) + n for i, slots in raw.execute("select id, slots from segments") for n in range(slots)]
    assert sorted(states) == every
    raw.close()
    usage = index.usage()
    assert usage.slots == len(every)
    assert usage.used == sum(index.usage(number).used for number in index.namespaces())


def test_what_was_published_is_found_in_the_order_of_the_keys(index: Index, space: int) -> None:
    keys, records = _stored(index, space, 20)
    split = [keys[i : i + KEY_SIZE] for i in range(0, len(keys), KEY_SIZE)]
    order = np.random.default_rng(1).permutation(20)
    found = index.lookup(space, b"".join(split[i] for i in order) + _keys(1) + split[7] * 2)
    assert (found.records[:20] == records[order]).all()
    assert found.records["slot"][20] == NO_SLOT
    assert (found.records[21:] == records[7]).all()
    assert found.records.dtype == RECORD_DTYPE


def test_many_keys_come_back_in_the_order_they_were_asked_in(index: Index, space: int) -> None:
    index.add_segment(space, (0,), GROUP, 2000, Stripe.TENSOR)
    keys, records = _stored(index, space, 1500)
    split = np.frombuffer(keys, np.uint8).reshape(-1, KEY_SIZE)
    order = np.random.default_rng(2).integers(0, 1500, 3000)  # with repetitions
    asked = np.concatenate([split[order], np.frombuffer(_keys(100), np.uint8).reshape(-1, KEY_SIZE)])
    found = index.lookup(space, asked.tobytes()).records
    assert (found[:3000] == records[order]).all()
    assert (found["slot"][3000:] == NO_SLOT).all()


def test_no_keys_no_records(index: Index, space: int) -> None:
    assert len(index.lookup(space, b"").records) == 0
    assert len(index.publish("me", space, b"", _records(np.empty(0, np.int64)))) == 0
    assert index.delete(space, b"", np.empty(0, np.int64)).tolist() == []


def test_a_key_of_another_namespace_is_not_found(index: Index, space: int) -> None:
    keys, _ = _stored(index, space, 3)
    other = index.namespace_id(OTHER)
    assert other != space
    assert (index.lookup(other, keys).records["slot"] == NO_SLOT).all()
    assert index.namespace_id(NAMESPACE) == space


def test_each_batch_is_one_statement(index: Index, space: int) -> None:
    slots = slots_of(index.lease("me", space, 8, EVER))
    keys, seen = _keys(8), list[str]()
    index.lookup(space, keys)  # so that a reader is open
    for connection in (index._writer, *index._readers):
        connection.set_trace_callback(seen.append)
    index.publish("me", space, keys, _records(slots))
    assert len(set(seen)) == 1  # its triggers show up under the same text
    seen.clear()
    index.lookup(space, keys)
    assert len(seen) == 1


def test_the_first_publisher_of_a_key_wins_and_the_slot_of_the_other_stays_its_own(index: Index, space: int) -> None:
    keys, first = _stored(index, space, 4)
    slots = slots_of(index.lease("you", space, 8, EVER))
    keys += _keys(1)
    second = _records(slots[:5])
    assert index.publish("you", space, keys, second).tolist() == [False] * 4 + [True]
    assert (index.lookup(space, keys).records == np.concatenate([first, second[4:]])).all()
    assert index.give_back("you", slots) == len(slots) - 1
    _check(index)


def test_a_key_twice_in_a_batch_is_published_once(index: Index, space: int) -> None:
    slots = slots_of(index.lease("me", space, 4, EVER))
    assert index.publish("me", space, _keys(1) * 4, _records(slots)).tolist() == [True, False, False, False]
    _check(index)


def test_a_publish_that_is_repeated_is_true_again(index: Index, space: int) -> None:
    keys, records = _stored(index, space, 4)
    assert index.publish("me", space, keys, records).all()


def test_only_the_lessee_of_a_slot_publishes_it(index: Index, space: int) -> None:
    mine, yours = slots_of(index.lease("me", space, 4, EVER)), slots_of(index.lease("you", space, 4, EVER))
    unleased = np.setdiff1d(np.arange(SLOTS) + (1 << 24), np.concatenate([mine, yours]))[:4]
    slots = np.concatenate([mine[:2], yours[:2], unleased])
    assert index.publish("me", space, _keys(8), _records(slots)).tolist() == [True] * 2 + [False] * 6
    _check(index)


def test_delete_needs_key_and_slot(index: Index, space: int) -> None:
    keys, records = _stored(index, space, 4)
    slots = records["slot"].astype(np.int64)
    before = index.epoch()
    assert index.delete(space, keys, slots[[0, 2, 1, 3]]).tolist() == [True, False, False, True]
    assert (index.lookup(space, keys).records["slot"] == NO_SLOT).tolist() == [True, False, False, True]
    assert index.epoch() > before
    assert index.delete(space, keys, slots).tolist() == [False, True, True, False]
    _check(index)


def test_a_freed_slot_is_not_leased_before_its_epoch_has_passed(index: Index, space: int) -> None:
    keys, records = _stored(index, space, SLOTS)
    before = index.lookup(space, keys).epoch
    index.delete(space, keys[:KEY_SIZE], records["slot"][:1].astype(np.int64))
    assert len(index.lease("you", space, 1, before)) == 0
    assert index.free_slots(space) == 1
    assert slots_of(index.lease("you", space, 1, index.epoch())).tolist() == records["slot"][:1].tolist()
    _check(index)


def test_a_dead_owner_loses_only_what_it_had_not_published(index: Index, space: int) -> None:
    keys, records = _stored(index, space, 6, owner="dead")
    kept, _ = _stored(index, space, 2, owner="alive")
    assert index.lessees() == {"dead", "alive"}
    assert index.reclaim("dead") == 2
    assert index.lessees() == {"alive"}
    assert (index.lookup(space, keys).records == records).all()
    assert (index.lookup(space, kept).records["slot"] != NO_SLOT).all()
    _check(index)


def test_a_reclaimed_slot_cannot_be_published_by_its_former_owner(index: Index, space: int) -> None:
    slots = slots_of(index.lease("dead", space, 4, EVER))
    index.reclaim("dead")
    again = slots_of(index.lease("you", space, SLOTS, EVER))
    assert set(slots.tolist()) <= set(again.tolist())
    assert not index.publish("dead", space, _keys(4), _records(slots)).any()
    assert index.give_back("dead", slots) == 0
    _check(index)


def test_a_lease_spans_segments_and_ends_with_the_room(index: Index, space: int) -> None:
    index.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    slots = slots_of(index.lease("me", space, SLOTS + 8, EVER))
    assert len(slots) == SLOTS + 8
    assert len(slots_of(index.lease("me", space, SLOTS, EVER))) == SLOTS - 8
    assert len(index.lease("me", space, 1, EVER)) == 0
    _check(index)


def test_namespaces_do_not_share_segments(index: Index, space: int) -> None:
    other = index.namespace_id(OTHER)
    assert len(index.lease("me", other, 4, EVER)) == 0
    assert index.usage(other).slots == 0


def test_a_retired_segment_serves_and_leases_nothing(index: Index, space: int) -> None:
    keys, records = _stored(index, space, 4)
    index.retire_segment(1)
    assert (index.lookup(space, keys).records == records).all()
    assert len(index.lease("me", space, 4, EVER)) == 0
    assert [row.state for row in index.segments()] == ["retired"]


def test_a_dropped_segment_takes_its_objects_and_leases_along_and_its_number_never_comes_back(
    index: Index, space: int
) -> None:
    kept = index.add_segment(space, (1,), GROUP, SLOTS, Stripe.OBJECT)
    index.retire_segment(kept)
    keys, records = _stored(index, space, 8)
    late = slots_of(index.lease("late", space, 4, EVER))
    index.delete(space, keys[:KEY_SIZE], records["slot"][:1].astype(np.int64))
    assert index.drop_segment(1) == 7
    assert (index.lookup(space, keys).records["slot"] == NO_SLOT).all()
    assert not index.publish("late", space, _keys(4), _records(late)).any()
    assert index.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR) > kept
    _check(index)


def test_bytes_of_the_clock_never_overlap_and_are_used_again(index: Index, space: int) -> None:
    for _ in range(3):
        index.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    index.drop_segment(2)
    index.add_segment(space, (0,), GROUP, 2 * SLOTS, Stripe.TENSOR)
    index.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    spans = sorted((row.clock, row.clock + row.slots) for row in index.segments())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] == 6 * SLOTS, "the gap was not used"


def test_clear_removes_one_namespace(index: Index, space: int) -> None:
    other = index.namespace_id(OTHER)
    index.add_segment(other, (0,), GROUP, SLOTS, Stripe.TENSOR)
    _stored(index, space, 9)
    keys, records = _stored(index, other, 5)
    assert index.clear(space) == 9
    assert (index.lookup(other, keys).records == records).all()
    assert index.clear(space) == 0
    _check(index)


def test_all_is_there_after_reopening(tmp_path: Path) -> None:
    first = _open(tmp_path)
    space = first.namespace_id(NAMESPACE)
    first.add_segment(space, (0, 0, 1), GROUP, SLOTS, Stripe.OBJECT)
    first.set_meta("store", "abc")
    keys, records = _stored(first, space, 5)
    rows = first.segments()
    first.close()
    second = _open(tmp_path)
    assert (second.lookup(space, keys).records == records).all()
    assert (second.segments(), second.meta("store"), second.meta("none")) == (rows, "abc", None)
    assert rows[0].cycle == (0, 0, 1)
    assert second.namespaces()[space].tensors == NAMESPACE.tensors
    _check(second)
    second.close()


def test_a_namespace_of_another_format_is_listed_with_its_size(index: Index) -> None:
    index.namespace_id(NAMESPACE)
    text = '{"tensors": [4096], "format": 9, "new": true}'
    index._writer.execute("insert into namespaces (digest, readable, created) values (x'00', ?, 0)", (text,))
    assert index.namespaces()[2].tensors == (4096,)
    assert index.usage(2).slots == 0


def test_a_reader_never_waits_for_a_writer(index: Index, space: int) -> None:
    keys, records = _stored(index, space, 4)
    writer = sqlite3.connect(index.path, isolation_level=None)
    writer.execute("begin immediate")
    writer.execute("delete from objects")
    assert (index.lookup(space, keys).records == records).all()
    writer.execute("rollback")
    writer.close()


def test_a_writer_that_gets_no_turn_fails_without_a_trace(index: Index, space: int) -> None:
    slots = slots_of(index.lease("me", space, 4, EVER))
    keys = _keys(4)
    index._writer.execute("pragma busy_timeout = 50")
    other = sqlite3.connect(index.path, isolation_level=None)
    other.execute("begin immediate")
    for attempt in (
        lambda: index.publish("me", space, keys, _records(slots)),
        lambda: index.lease("me", space, 4, EVER),
        lambda: index.delete(space, keys, slots),
    ):
        with pytest.raises(StoreError, match="Another process"):
            attempt()
    other.execute("rollback")
    other.close()
    assert index._metrics.value("tutti_index_errors", op="publish") == 1
    assert index.publish("me", space, keys, _records(slots)).all()
    _check(index)


def test_a_lookup_that_fails_is_counted_and_finds_nothing(index: Index, space: int) -> None:
    keys, _ = _stored(index, space, 4)
    index._writer.execute("alter table objects rename to lost")
    assert (index.lookup(space, keys).records["slot"] == NO_SLOT).all()
    assert index._metrics.value("tutti_index_errors", op="lookup") == 1
    index._writer.execute("alter table lost rename to objects")
    assert (index.lookup(space, keys).records["slot"] != NO_SLOT).all()


def test_a_failed_transaction_leaves_nothing(index: Index, space: int) -> None:
    index._writer.execute("create trigger no before insert on leased begin select raise(abort, 'no'); end")
    with pytest.raises(StoreError):
        index.lease("me", space, 4, EVER)
    index._writer.execute("drop trigger no")
    _check(index)
    assert len(slots_of(index.lease("me", space, SLOTS, EVER))) == SLOTS


def test_after_fork_the_child_is_refused(index: Index, space: int) -> None:
    keys, records = _stored(index, space, 2)
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


def test_the_file_is_private(index: Index, space: int) -> None:
    _stored(index, space, 1)
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
    whole = _open(tmp_path)
    space = whole.namespace_id(NAMESPACE)
    whole.add_segment(space, (0,), GROUP, SLOTS, Stripe.TENSOR)
    keys, records = _stored(whole, space, SLOTS)
    whole.close()
    data = (tmp_path / "index.db").read_bytes()
    refused = 0
    for size in range(0, len(data), 4096 + 512):
        (tmp_path / "index.db").write_bytes(data[:size])
        try:
            cut = _open(tmp_path)
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
        _open(tmp_path)
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
    records["slot"], records["root"] = slots, slots * 7
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
        _check(index)
        for owner in owners:
            index.reclaim(owner)
        assert index.usage().leased == 0
    index.clear(space)
    assert len(slots_of(index.lease("me", space, SLOTS, EVER))) == SLOTS
    _check(index)


def test_a_stopped_process_costs_others_at_most_failed_writes(index: Index, space: int) -> None:
    keys, records = _stored(index, space, 4)
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
                index.publish("me", space, _keys(1), _records(np.array([slot])))
            os.kill(process.pid, signal.SIGCONT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(random.uniform(0.005, 0.03))
    finally:
        process.kill()
        process.communicate()
    index.reclaim(owner)
    _check(index)


class Machine(RuleBasedStateMachine):
    """Two processes' worth of handles against a dictionary."""

    def __init__(self) -> None:
        super().__init__()

        self.directory = tempfile.TemporaryDirectory()
        self.handles = [_open(Path(self.directory.name)) for _ in range(2)]
        self.space = self.handles[0].namespace_id(NAMESPACE)
        self.segments: list[int] = []
        self.model: dict[bytes, np.void] = {}
        self.held: dict[int, str] = {}
        self.keys = [bytes([n]) * KEY_SIZE for n in range(12)]
        self.grow(0)

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        self.directory.cleanup()

    @rule(which=st.integers(0, 1))
    def grow(self, which: int) -> None:
        if len(self.segments) < 3:
            self.segments.append(self.handles[which].add_segment(self.space, (0,), 2, 6, Stripe.TENSOR))

    @rule(which=st.integers(0, 1), owner=st.sampled_from("ab"), want=st.integers(1, 9), old=st.booleans())
    def lease(self, which: int, owner: str, want: int, old: bool) -> None:
        index = self.handles[which]
        slots = slots_of(index.lease(owner, self.space, want, 0 if old else index.epoch()))
        assert not self.held.keys() & set(slots.tolist())
        assert not {int(record["slot"]) for record in self.model.values()} & set(slots.tolist())
        self.held |= dict.fromkeys(slots.tolist(), owner)

    @rule(which=st.integers(0, 1), owner=st.sampled_from("ab"), keys=st.lists(st.integers(0, 11), max_size=6))
    def publish(self, which: int, owner: str, keys: list[int]) -> None:
        mine = [slot for slot, holder in self.held.items() if holder == owner][: len(keys)]
        chosen = [self.keys[n] for n in keys[: len(mine)]]
        records = _records(np.array(mine, dtype=np.int64))
        published = self.handles[which].publish(owner, self.space, b"".join(chosen), records)
        for key, record, done in zip(chosen, records, published, strict=True):
            assert done == (key not in self.model)
            if done:
                self.model[key] = record
                del self.held[int(record["slot"])]

    @rule(which=st.integers(0, 1), keys=st.lists(st.integers(0, 11), max_size=6, unique=True), wrong=st.booleans())
    def delete(self, which: int, keys: list[int], wrong: bool) -> None:
        chosen = [self.keys[n] for n in keys]
        slots = [int(self.model[key]["slot"]) if key in self.model else 1 for key in chosen]
        gone = self.handles[which].delete(self.space, b"".join(chosen), np.array(slots, dtype=np.int64) + wrong)
        assert gone.tolist() == [key in self.model and not wrong for key in chosen]
        for key, done in zip(chosen, gone, strict=True):
            if done:
                del self.model[key]

    @rule(which=st.integers(0, 1), owner=st.sampled_from("ab"), some=st.booleans())
    def free(self, which: int, owner: str, some: bool) -> None:
        mine = [slot for slot, holder in self.held.items() if holder == owner]
        if some:
            mine = mine[:2]
            assert self.handles[which].give_back(owner, np.array(mine, dtype=np.int64)) == len(mine)
        else:
            assert self.handles[which].reclaim(owner) == len(mine)
        for slot in mine:
            del self.held[slot]

    @rule(which=st.integers(0, 1))
    def drop(self, which: int) -> None:
        if len(self.segments) > 1:
            segment = self.segments.pop(0)
            gone = {key for key, record in self.model.items() if int(record["slot"]) >> 24 == segment}
            assert self.handles[which].drop_segment(segment) == len(gone)
            self.model = {key: record for key, record in self.model.items() if key not in gone}
            self.held = {slot: owner for slot, owner in self.held.items() if slot >> 24 != segment}

    @invariant()
    def every_slot_has_one_state_and_every_handle_sees_the_model(self) -> None:
        for index in self.handles:
            _check(index)
            found = index.lookup(self.space, b"".join(self.keys)).records
            for key, record in zip(self.keys, found, strict=True):
                assert record == self.model[key] if key in self.model else record["slot"] == NO_SLOT


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
