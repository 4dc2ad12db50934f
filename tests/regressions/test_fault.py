"""FAULT: what fails is contained: it is a miss, and nothing else."""

import errno
import random
import threading
from pathlib import Path

import pytest

from tests.store.kit import (
    Pages,
    Weather,
    close_good,
    eventually,
    get,
    keys,
    lookup,
    namespace,
    open_store,
    put,
    soon,
    store_pages,
    value,
)
from tutti_sglang.engine.batch import Operation
from tutti_sglang.engine.system import SYSTEM, Iovecs, Place, Seam
from tutti_sglang.store import health, writer
from tutti_sglang.testing.faults import EVERY_BLOCK, READS, Fault, FaultPlan


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(health, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(writer, "TICK_SECONDS", 0.02)


def test_closing_under_a_get_leaves_its_rows_and_no_thread(disk: Path) -> None:
    """B52: elsewhere a worker that nobody could reach went on writing into pages that were somebody else's."""
    store = open_store(disk)
    store_pages(store, store.attach(namespace()), *range(20))
    close_good(store)
    threads = threading.active_count()
    for turn in range(10):
        _close_under_a_get(disk, first_close=bool(turn % 2))
    assert eventually(lambda: threading.active_count() <= threads)


def _close_under_a_get(disk: Path, first_close: bool) -> None:
    weather = Weather()
    store = open_store(disk, seam=weather)
    ns = store.attach(namespace())
    assert all(get(store, ns, *range(20)))
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=READS)
    pages, answers = Pages(20).wipe(), []
    reader = threading.Thread(target=lambda: answers.append(store.get(ns, keys(*range(20)), pages.rows, soon(0.2))))
    reader.start()
    assert eventually(lambda: weather.stalled)
    if first_close:
        store.close(0.1)
    reader.join(30)
    assert not answers[0].any()
    store.close(0.1)
    weather.plan.gate.open()
    assert eventually(lambda: not weather.stalled)
    assert (pages.bytes == 0xEE).all()


@pytest.mark.parametrize("code", [errno.EIO, errno.EAGAIN, errno.EINTR])
def test_a_hiccup_in_every_tenth_write_truncates_no_prefix(disk: Path, code: int) -> None:
    """B53: elsewhere one failed batch cut the rest off, and the whole was reported as stored."""

    class Tenth(Seam):
        def __init__(self) -> None:
            self.count, self.failed = 0, set[int]()

        def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
            if operation is Operation.WRITE and place.drive_offset not in self.failed:
                self.count += 1
                if self.count % 10 == 0:
                    self.failed.add(place.drive_offset)
                    return -code
            return SYSTEM.transfer(operation, place, iovecs)

    seam = Tenth()
    store = open_store(disk, seam=seam, max_io=16 << 10)
    ns = store.attach(namespace())
    for start in range(0, 160, 40):
        store_pages(store, ns, *range(start, start + 40))
    assert len(seam.failed) > 2
    assert all(get(store, ns, *range(160)))
    assert value(store, "tutti_put_objects", outcome="dropped") == 0
    close_good(store)


def test_load_from_many_threads_with_rare_faults_ends_with_a_store_that_is_right(disk: Path) -> None:
    """B56: elsewhere a benchmark of long documents brought the engine down, nobody knew why."""
    weather = Weather()
    store = open_store(disk, seam=weather, max_size=4 << 20, staging_size=2 << 20)
    spaces = [store.attach(namespace(model)) for model in "ab"]
    kinds = (Fault.ERROR, Fault.SHORT, Fault.TORN, Fault.LATE)
    weather.plan = FaultPlan(dict.fromkeys(kinds, EVERY_BLOCK // 1000))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                ns, start = rng.choice(spaces), rng.randrange(400)
                numbers = range(start, start + rng.randint(1, 30))
                act = rng.random()
                if act < 0.4:
                    put(store, ns, *numbers)
                elif act < 0.8:
                    get(store, ns, *numbers)
                elif act < 0.98:
                    lookup(store, ns, *numbers)
                else:
                    store.clear(ns)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive()
    assert not errors
    assert value(store, "tutti_io_errors") > 0
    assert value(store, "tutti_hit_objects", tier="drive") > 0
    assert value(store, "tutti_call_errors") == 0
    weather.plan = None
    assert store.drain(20)
    assert eventually(lambda: store.stats().drives_in_service == 1)
    store.verify(repair=True)
    assert eventually(lambda: not store._parts.staging.used)
    close_good(store)
