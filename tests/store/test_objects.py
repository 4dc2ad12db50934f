"""The object store as its callers see it: what was put comes back, whole or not at all."""

import os
import random
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.store.kit import (
    MIB,
    SLOTS,
    TENSORS,
    Pages,
    Weather,
    close_good,
    config,
    eventually,
    get,
    keys,
    lookup,
    namespace,
    open_store,
    put,
    segment_files,
    soon,
    store_pages,
    value,
)
from tutti_sglang.errors import CapacityError, StoreError
from tutti_sglang.store import ObjectStore, schema
from tutti_sglang.testing.faults import EVERY_BLOCK, WRITES, Fault, FaultPlan


def test_what_was_put_comes_back_from_staging_from_the_drive_and_after_a_restart(disk: Path) -> None:
    weather = Weather()
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    store = open_store(disk, seam=weather)
    ns = store.attach(namespace())
    assert all(put(store, ns, *range(20)))
    assert all(get(store, ns, *range(20)))
    assert value(store, "tutti_hit_objects", tier="staging") == 20
    weather.plan.gate.open()
    assert store.drain(8)
    assert store.stats().accepted == 0
    assert get(store, ns, *range(18, 22)) == [True, True, False, False]
    assert lookup(store, ns, *range(18, 22)) == [True, True, False, False]
    assert value(store, "tutti_hit_objects", tier="drive") == 2
    close_good(store)
    store = open_store(disk)
    ns = store.attach(namespace())
    assert all(get(store, ns, *range(20)))
    close_good(store)


@pytest.mark.parametrize("tensors", [(4096,), (1, 4097, 100), (65536,) * 4, (300, 300), (200_000, 8192)])
@pytest.mark.parametrize("checksum", ["on", "off"])
def test_any_tensor_sizes_come_back(disk: Path, tensors: tuple[int, ...], checksum: str) -> None:
    store = open_store(disk, checksum=checksum)
    ns = store.attach(namespace(tensors=tensors))
    store_pages(store, ns, *range(7), tensors=tensors)
    assert get(store, ns, *range(8), tensors=tensors) == [True] * 7 + [False]
    assert store.close()


def test_random_puts_gets_and_lookups_never_give_wrong_bytes(disk: Path) -> None:
    random.seed(7)
    store = open_store(disk, max_size=4 * MIB)
    spaces = [store.attach(namespace(model)) for model in "ab"]
    put_at: dict[tuple[int, int], int] = {}
    for turn in range(60):
        ns, numbers = random.choice(spaces), random.sample(range(300), random.randint(1, 40))
        pages = [number + 1000 * ns for number in numbers]
        if random.random() < 0.6:
            put(store, ns, *pages)
            put_at.update(((ns, page), turn) for page in pages)
        else:
            assert all((ns, page) in put_at for page, found in zip(pages, get(store, ns, *pages), strict=True) if found)
            claimed = lookup(store, ns, *pages)
            assert all((ns, page) in put_at for page, found in zip(pages, claimed, strict=True) if found)
    assert eventually(lambda: store.stats().objects > 0)
    close_good(store)


def test_put_skips_what_is_there_and_keys_that_come_twice(disk: Path) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, 1, 2, 1)
    for _ in range(20):
        assert all(put(store, ns, 1, 2, 2))
    assert store.drain(8)
    assert value(store, "tutti_bytes", op="write") == 2 * sum(TENSORS)
    assert eventually(lambda: store.stats().objects == 2)
    close_good(store)


def test_the_same_keys_from_many_threads_are_stored_once(disk: Path) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.extend(put(store, ns, *range(30)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers)
    assert store.drain(8)
    assert eventually(lambda: store.stats().objects == 30)
    assert all(get(store, ns, *range(30)))
    close_good(store)


def test_namespaces_never_meet(disk: Path) -> None:
    store = open_store(disk)
    one, other = store.attach(namespace("one")), store.attach(namespace("other"))
    store_pages(store, one, *range(10))
    assert not any(lookup(store, other, *range(10)))
    assert not any(get(store, other, *range(10)))
    close_good(store)


def test_a_full_store_evicts_and_serves_what_came_last(disk: Path) -> None:
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    for start in range(0, 12 * SLOTS, 16):
        store_pages(store, ns, *range(start, start + 16))
        assert all(get(store, ns, *range(start, start + 16)))
    assert value(store, "tutti_evicted_objects") > 0
    assert value(store, "tutti_put_objects", outcome="dropped") == 0
    assert sum(os.stat(file).st_blocks * 512 for file in segment_files(disk)) <= 4 * MIB
    claimed = lookup(store, ns, *range(12 * SLOTS))
    assert get(store, ns, *range(12 * SLOTS)) == claimed
    assert sum(claimed) >= 2 * SLOTS
    close_good(store)


def test_each_claim_is_kept_while_another_thread_evicts(disk: Path) -> None:
    store = open_store(disk, max_size=2 * MIB)
    ns = store.attach(namespace())
    stop = threading.Event()

    def write() -> None:
        for start in range(0, 4000, 8):
            if stop.is_set():
                return
            put(store, ns, *range(start, start + 8))

    thread = threading.Thread(target=write)
    thread.start()
    delivered = 0
    for _ in range(60):
        newest = int(value(store, "tutti_put_objects", outcome="written"))
        delivered += sum(get(store, ns, *range(max(0, newest - 20), newest + 20)))
    stop.set()
    thread.join()
    assert delivered
    close_good(store)


def test_staging_that_is_full_refuses_at_the_deadline_and_takes_more_later(disk: Path) -> None:
    weather = Weather()
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    store = open_store(disk, seam=weather, staging_size=MIB)
    ns = store.attach(namespace())
    pages = Pages(60).fill(*range(60))
    answers = store.put(ns, keys(*range(60)), pages.rows, soon(0.2))
    assert answers.any()
    assert not answers.all()
    assert value(store, "tutti_put_objects", outcome="refused") == 60 - answers.sum()
    assert get(store, ns, *range(60)) == answers.tolist()
    weather.plan.gate.open()
    assert store.put(ns, keys(*range(60)), pages.rows, soon()).all()
    assert store.drain(8)
    assert all(get(store, ns, *range(60)))
    close_good(store)


def test_reads_find_staging_while_writes_hang(disk: Path) -> None:
    weather = Weather()
    store = open_store(disk, seam=weather, staging_size=MIB)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(10))
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    pages = Pages(60).fill(*range(100, 160))
    store.put(ns, keys(*range(100, 160)), pages.rows, soon(0.1))
    assert all(get(store, ns, *range(10)))
    weather.plan.gate.open()
    close_good(store)


def test_clear_removes_stored_and_accepted_objects_of_its_namespace_only(disk: Path) -> None:
    weather = Weather()
    store = open_store(disk, seam=weather)
    mine, other = store.attach(namespace("mine")), store.attach(namespace("other"))
    store_pages(store, mine, *range(10))
    store_pages(store, other, *range(10))
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    assert all(put(store, mine, *range(10, 20)))
    assert store.clear(mine) == 20
    weather.plan.gate.open()
    assert store.drain(8)
    assert not any(lookup(store, mine, *range(20)))
    assert not any(get(store, mine, *range(20)))
    assert all(get(store, other, *range(10)))
    close_good(store)


def test_clear_gets_its_turn_beside_somebody_who_writes_for_long(disk: Path) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(10))
    other = sqlite3.connect(disk / "index.db", isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")
    release = threading.Timer(schema.WRITE_TIMEOUT + 0.5, other.execute, ["rollback"])
    release.start()
    assert store.clear(ns) == 10
    assert not any(lookup(store, ns, *range(10)))
    release.join()
    other.close()
    close_good(store)


def test_rows_may_be_overwritten_as_soon_as_put_returned(disk: Path) -> None:
    weather = Weather()
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    store = open_store(disk, seam=weather)
    ns = store.attach(namespace())
    pages = Pages(5).fill(*range(5))
    assert store.put(ns, keys(*range(5)), pages.rows, soon()).all()
    pages.wipe()
    weather.plan.gate.open()
    assert store.drain(8)
    assert all(get(store, ns, *range(5)))
    close_good(store)


def test_close_writes_what_was_accepted_gives_all_back_and_is_idempotent(disk: Path) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for turn in range(5):
        store = open_store(disk)
        ns = store.attach(namespace())
        assert all(put(store, ns, *range(10 * turn, 10 * turn + 10)))
        assert store.close()
        assert store.close()
        assert not any(get(store, ns, *range(10)))
        assert not any(put(store, ns, *range(10)))
        assert store.clear(ns) == 0
    assert eventually(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == before)
    store = open_store(disk)
    assert all(get(store, store.attach(namespace()), *range(50)))
    close_good(store)


def test_get_puts_no_byte_into_any_row_after_it_returned(disk: Path) -> None:
    """A drive that answers after the deadline writes into staging that nobody else has, never into rows (B59)."""
    weather = Weather()
    store = open_store(disk, seam=weather)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(10))
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK})
    pages = Pages(10).wipe()
    began = time.monotonic()
    assert not store.get(ns, keys(*range(10)), pages.rows, soon(0.2)).any()
    assert time.monotonic() - began < 5
    assert value(store, "tutti_missed_objects", reason="deadline") == 10
    assert store._parts.staging.quarantined > 0
    weather.plan.gate.open()
    assert eventually(lambda: not store._parts.staging.quarantined)
    assert (pages.bytes == 0xEE).all()
    weather.plan = None
    assert eventually(lambda: all(get(store, ns, *range(10))))
    close_good(store)


def test_many_gets_share_a_staging_of_few_pages(disk: Path) -> None:
    """All end within their deadline (B109)."""
    tensors = (1 << 18,)
    store = open_store(disk, staging_size=MIB)
    ns = store.attach(namespace(tensors=tensors))
    for page in range(8):
        store_pages(store, ns, page, tensors=tensors)
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.extend(get(store, ns, *range(8), tensors=tensors))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 16 * 8
    assert all(answers)
    close_good(store)


def test_close_waits_for_calls_and_nothing_is_touched_afterwards(disk: Path) -> None:
    """Gets and puts that are under way end, with or without what they asked for (B52)."""
    before = threading.active_count()
    for turn in range(10):
        store = open_store(disk)
        ns = store.attach(namespace())
        put(store, ns, *range(200))
        pages = [Pages(200).wipe() for _ in range(3)]
        threads = [
            threading.Thread(target=store.get, args=(ns, keys(*range(200)), each.rows, soon())) for each in pages
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.004 * turn)
        assert store.close()
        seen = [each.bytes.copy() for each in pages]
        for thread in threads:
            thread.join()
        assert all((each.bytes == copy).all() for each, copy in zip(pages, seen, strict=True))
        assert value(store, "tutti_call_errors") == 0
    assert eventually(lambda: threading.active_count() == before)
    close_good(open_store(disk))


def test_addresses_may_be_changed_while_a_call_is_under_way(disk: Path) -> None:
    """They are copied on entry (B58)."""
    weather = Weather()
    store = open_store(disk, seam=weather)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(10))
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK})
    pages, elsewhere = Pages(10).wipe(), Pages(10).wipe()
    rows = pages.rows.copy()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.extend(store.get(ns, keys(*range(10)), rows, soon())))
    thread.start()
    assert eventually(lambda: weather.stalled)
    rows[:] = elsewhere.rows
    weather.plan.gate.open()
    thread.join()
    assert all(answers)
    assert all(pages.holds(each, each) for each in range(10))
    assert (elsewhere.bytes == 0xEE).all()
    close_good(store)


def test_a_forked_child_is_told_that_the_store_is_not_its_own(disk: Path) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, 1)
    child = os.fork()
    if not child:
        try:
            store.lookup(ns, keys(1))
        except StoreError as error:
            os._exit(0 if "fork" in str(error) and store.close() else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get(store, ns, 1) == [True]
    close_good(store)


def test_two_stores_of_one_process_share_a_directory(disk: Path) -> None:
    one, two = open_store(disk), open_store(disk)
    ns = one.attach(namespace())
    assert two.attach(namespace()) == ns
    store_pages(one, ns, *range(0, 40))
    assert all(get(two, ns, *range(40)))
    store_pages(two, ns, *range(20, 80))
    assert all(get(one, ns, *range(80)))
    assert one.close()
    assert all(get(two, ns, *range(80)))
    close_good(two)


def test_a_page_that_can_never_be_stored_is_refused_at_attach(disk: Path) -> None:
    store = open_store(disk)
    with pytest.raises(CapacityError, match="staging_size"):
        store.attach(namespace(tensors=(16 * MIB,)))
    with pytest.raises(CapacityError, match="segment_size"):
        store.attach(namespace(tensors=(2 * MIB,)))
    close_good(store)


def test_the_writer_outlives_a_bug(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(store._room, "take", broken)
        assert all(put(store, ns, 1))
        assert store.drain(8)
    with monkeypatch.context() as patch:
        patch.setattr(store._publisher, "publish", broken)
        assert all(put(store, ns, 2))
        assert store.drain(8)
    assert value(store, "tutti_call_errors", call="writer") == 2
    assert lookup(store, ns, 1, 2) == [False, False]
    store_pages(store, ns, 3)
    assert get(store, ns, 1, 2, 3) == [False, False, True]
    assert store.verify().good
    assert store.close()


@pytest.mark.parametrize("call", ["lookup", "get", "put", "clear"])
def test_no_bug_of_ours_reaches_the_caller(disk: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    for error in (RuntimeError, MemoryError, OSError(5, "Input/output error")):

        def broken(*_: object, error: type[Exception] | Exception = error, **__: object) -> None:
            raise error

        for name in ("lookup", "locate", "clear"):
            monkeypatch.setattr(store._parts.index, name, broken)
        pages = Pages(2)
        arguments = {"lookup": (keys(1, 2),), "clear": ()}.get(call, (keys(1, 2), pages.rows, soon()))
        assert not np.any(getattr(store, call)(ns, *arguments))
    assert value(store, "tutti_call_errors", call=call) == 2
    assert store.close()


def test_opening_a_full_store_is_quick_and_says_what_is_used(disk: Path) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(100))
    line = store.describe()
    assert f"0 {disk}: 4MiB of 8MiB, O_DIRECT" in line
    assert "engine threads" in line
    assert store.close()
    assert isinstance(open_store(disk).close(), bool)


def test_a_store_needs_no_argument_but_its_settings(disk: Path) -> None:
    store = ObjectStore(config(disk))
    ns = store.attach(namespace())
    store_pages(store, ns, *range(3))
    assert all(get(store, ns, *range(3)))
    assert store.close()
