"""Faults under the engine: errno, short, torn, late and hanging I/O, full and read-only disks. Neighbours are served,
counters tell the kind, the drive leaves and returns."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.kit import (
    MIB,
    SLOTS,
    TENSORS,
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
from tutti_sglang.geometry import Stripe
from tutti_sglang.memory import view
from tutti_sglang.store import ObjectStore, health, writer
from tutti_sglang.testing.faults import EVERY_BLOCK, READS, WRITES, Fault, FaultPlan

STRIDE = 8192
SLOT_3 = {"begin": MIB + 3 * STRIDE, "end": MIB + 4 * STRIDE}
"""The first tensor of slot 3 of segment 1."""


class Hiccup(Seam):
    """The first `times` calls of an operation that touch the first tensor of slot 3 fail."""

    def __init__(self, operation: Operation, code: int, times: int = 2) -> None:
        self.operation, self.code, self.times = operation, code, times

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        end = place.drive_offset + int(iovecs[:, 1].sum())
        touched = place.drive_offset < SLOT_3["end"] and end > SLOT_3["begin"]
        if operation is self.operation and touched and self.times:
            self.times -= 1
            return -self.code
        return SYSTEM.transfer(operation, place, iovecs)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(health, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(writer, "TICK_SECONDS", 0.02)


def filled(disk: Path, weather: Seam, pages: int = 20, **changes: object) -> tuple[ObjectStore, int]:
    """A store with pages 0 … pages - 1 on its drives."""
    store = open_store(disk, seam=weather, **changes)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(pages))
    return store, ns


@pytest.mark.parametrize("code", [errno.EIO, errno.EAGAIN, errno.ENOMEM])
@pytest.mark.parametrize("operation", Operation)
def test_a_hiccup_is_not_seen(disk: Path, operation: Operation, code: int) -> None:
    store, ns = filled(disk, Hiccup(operation, code))
    assert all(get(store, ns, *range(20)))
    assert value(store, "tutti_io_errors", kind=errno.errorcode[code]) > 0
    assert value(store, "tutti_put_objects", outcome="dropped") == 0
    close_good(store)


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.ZERO])
def test_an_unreadable_object_is_a_miss_and_its_neighbours_are_served(disk: Path, fault: Fault) -> None:
    weather = Weather()
    store, ns = filled(disk, weather)
    weather.plan = FaultPlan({fault: EVERY_BLOCK}, operations=READS, **SLOT_3)
    assert sum(get(store, ns, *range(20))) == 19
    assert value(store, "tutti_missed_objects", reason="io") == 1
    assert value(store, "tutti_io_errors", op="read", kind="EIO") >= 1
    assert sum(lookup(store, ns, *range(20))) == 19, "exists and unreadable twice in a row"
    weather.plan = None
    assert all(get(store, ns, *range(20))), "a drive's hiccup must not delete an object"
    assert store.stats().drives_in_service == 1
    close_good(store)


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.LATE])
def test_short_and_late_transfers_are_carried_to_the_end(disk: Path, fault: Fault) -> None:
    weather = Weather()
    weather.plan = FaultPlan({fault: EVERY_BLOCK // 4}, seed=5)
    store, ns = filled(disk, weather)
    assert all(get(store, ns, *range(20)))
    assert value(store, "tutti_io_errors") == 0
    close_good(store)


@pytest.mark.parametrize("operation", [READS, WRITES])
def test_torn_transfers_are_misses_never_wrong_bytes(disk: Path, operation: int) -> None:
    weather = Weather()
    weather.plan = FaultPlan({Fault.TORN: EVERY_BLOCK // 40}, seed=1, operations=operation)
    store, ns = filled(disk, weather, 100)
    staging = store._parts.staging  # where a torn read leaves a hole, the very bytes may still lie from the put
    view(staging.address, staging.size)[:] = 0xEE
    found = get(store, ns, *range(100))
    assert any(found)
    assert not all(found)
    assert value(store, "tutti_missed_objects", reason="checksum") == 100 - sum(found)
    weather.plan = None
    store_pages(store, ns, *range(100))
    assert all(get(store, ns, *range(100)))
    close_good(store)


def test_a_lost_write_is_a_miss(disk: Path) -> None:
    weather = Weather()
    weather.plan = FaultPlan({Fault.TORN: EVERY_BLOCK}, operations=WRITES)
    store, ns = filled(disk, weather)
    weather.plan = None
    assert not any(get(store, ns, *range(20)))
    store_pages(store, ns, *range(20))
    assert all(get(store, ns, *range(20)))
    close_good(store)


def test_a_failed_write_fails_its_own_object_only(disk: Path) -> None:
    weather = Weather()
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, operations=WRITES, **SLOT_3)
    store = open_store(disk, seam=weather)
    ns = store.attach(namespace())
    assert all(put(store, ns, *range(20)))
    assert store.drain(8)
    assert value(store, "tutti_put_objects", outcome="dropped") == 1
    assert sum(get(store, ns, *range(20))) == 19
    weather.plan = None
    store_pages(store, ns, *range(20))
    assert all(get(store, ns, *range(20)))
    close_good(store)


def test_a_dead_drive_is_fast_misses_until_it_is_back(disk: Path) -> None:
    weather = Weather()
    store, ns = filled(disk, weather, 40)
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK})
    assert eventually(lambda: not any(get(store, ns, *range(40))) and store.stats().drives_in_service == 0)
    assert not any(lookup(store, ns, *range(40)))
    calls = weather.calls
    for _ in range(20):
        assert not any(get(store, ns, *range(40)))
    assert weather.calls == calls, "a drive out of service is tried now and then, not asked"
    weather.plan = None
    assert eventually(lambda: store.stats().drives_in_service == 1)
    assert value(store, "tutti_drive_in_service") == 1
    assert all(get(store, ns, *range(40)))
    store_pages(store, ns, *range(40, 60))
    assert all(get(store, ns, *range(60)))
    close_good(store)


@pytest.mark.parametrize("stripe", Stripe)
def test_one_of_two_drives_dies_while_running_and_comes_back(disk: Path, stripe: Stripe) -> None:
    weather = Weather()
    store = open_store(disk / "a", disk / "b", index_dir=str(disk / "index"), seam=weather, stripe=stripe)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(2 * SLOTS))
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, drive=1)
    assert eventually(lambda: sum(get(store, ns, *range(2 * SLOTS))) >= 0 and store.stats().drives_in_service == 1)
    if stripe is Stripe.TENSOR:
        assert not any(lookup(store, ns, *range(2 * SLOTS)))
    store_pages(store, ns, *range(100, 100 + SLOTS))
    assert all(get(store, ns, *range(100, 100 + SLOTS))), "new segments use the other drive"
    weather.plan = None
    assert eventually(lambda: store.stats().drives_in_service == 2)
    assert all(get(store, ns, *range(2 * SLOTS))), "nothing was lost"
    assert all(get(store, ns, *range(100, 100 + SLOTS)))
    close_good(store)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_no_writes_still_serves_reads(disk: Path, code: int) -> None:
    weather = Weather()
    store, ns = filled(disk, weather)
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, operations=WRITES, error=code)
    for number in range(100, 120):
        put(store, ns, number)
        store.drain(8)
    assert value(store, "tutti_io_errors", op="write", kind=errno.errorcode[code]) > 0
    assert store.stats().drives_in_service == 0
    assert all(get(store, ns, *range(20)))
    assert all(lookup(store, ns, *range(20)))
    weather.plan = None
    assert eventually(lambda: store.stats().drives_in_service == 1)
    store_pages(store, ns, *range(100, 120))
    assert all(get(store, ns, *range(100, 120)))
    close_good(store)


def test_a_late_answer_touches_no_slot_that_is_used_again(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes hang beyond the deadline; their slots and memory stay set apart until the drive answers."""
    monkeypatch.setattr(writer, "WRITE_SECONDS", 0.3)
    weather, tensors = Weather(), (16384,)
    store = open_store(disk, seam=weather, max_size=2 * MIB)
    ns = store.attach(namespace(tensors=tensors))
    weather.plan = hanging = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    assert all(put(store, ns, *range(100, 108), tensors=tensors))
    assert store.drain(8)
    assert value(store, "tutti_put_objects", outcome="dropped") == 8
    assert value(store, "tutti_io_errors", kind="EINPROGRESS") == 8
    assert not any(lookup(store, ns, *range(100, 108)))
    assert not any(put(store, ns, 300, tensors=tensors)), "no drive takes writes"
    weather.plan = None
    assert eventually(lambda: store.stats().drives_in_service == 1)
    for number in range(200, 400):
        assert put(store, ns, number, tensors=tensors) == [True]
        assert store.drain(8)
    kept = lookup(store, ns, *range(200, 400))
    assert any(kept)
    assert weather.stalled
    assert store._parts.staging.quarantined > 0
    hanging.gate.open()
    assert eventually(lambda: not weather.stalled and not store._parts.staging.quarantined)
    assert get(store, ns, *range(200, 400), tensors=tensors) == kept
    assert not any(lookup(store, ns, *range(100, 108)))
    close_good(store)


def test_memory_that_a_drive_may_still_write_to_is_given_to_nobody_whatever_fails_then(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weather = Weather()
    store, ns = filled(disk, weather)
    weather.plan = hanging = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=READS)

    @contextlib.contextmanager
    def reading(*_: object) -> Iterator[None]:
        yield
        raise OSError(errno.ENOLCK, "no locks available")

    with monkeypatch.context() as broken:
        broken.setattr(store._parts.window, "reading", reading)
        assert not any(store.get(ns, keys(*range(20)), Pages(20).rows, soon(0.3)))
    assert weather.stalled
    assert store._parts.staging.quarantined
    hanging.gate.open()
    weather.plan = None
    assert eventually(lambda: not store._parts.staging.quarantined)
    assert eventually(lambda: all(get(store, ns, *range(20))))
    close_good(store)


def test_close_does_not_wait_for_a_drive_that_hangs(disk: Path) -> None:
    weather = Weather()
    store, ns = filled(disk, weather)
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK})
    put(store, ns, *range(100, 110))
    began = soon(0)
    assert not store.close(0.5)
    assert soon(0) - began < 5
    owner = store._parts.owners
    other = open_store(disk)
    assert owner.uuid in other._parts.owners.live(), "the drive may still write to its slots"
    assert other.close()
    weather.plan.gate.open()
    assert eventually(lambda: store.close(1))


def test_a_drain_that_takes_too_long_says_so(disk: Path) -> None:
    weather = Weather()
    store, ns = filled(disk, weather)
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK})
    put(store, ns, *range(100, 110))
    assert not store.drain(0.1)
    weather.plan.gate.open()
    assert store.drain(8)
    close_good(store)


@pytest.mark.parametrize("refused", [READS, WRITES, READS | WRITES])
def test_direct_io_refused_later_on_goes_on_through_the_page_cache(disk: Path, refused: int) -> None:
    """O_DIRECT works when probed and is refused later (B89)."""

    class Refusing(Seam):
        def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
            direct = fcntl.fcntl(place.fd, fcntl.F_GETFL) & os.O_DIRECT
            return -errno.EINVAL if direct and refused >> operation & 1 else SYSTEM.transfer(operation, place, iovecs)

    store, ns = filled(disk, Refusing(), 40)
    assert all(get(store, ns, *range(40)))
    assert "page cache (I/O with O_DIRECT was refused later on)" in store.describe()
    assert value(store, "tutti_put_objects", outcome="dropped") == 0
    close_good(store)


def test_a_full_file_system_makes_room_and_the_write_succeeds(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy on write or thin provisioning: a write into preallocated space fails with ENOSPC (B47)."""
    weather = Weather()
    store, ns = filled(disk, weather, 100)
    assert eventually(lambda: store.stats().objects == 100)
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, operations=WRITES, error=errno.ENOSPC)
    relieve = store._room.relieve

    def and_free() -> None:
        relieve()
        weather.plan = None

    monkeypatch.setattr(store._room, "relieve", and_free)
    assert all(put(store, ns, *range(200, 210)))
    assert store.drain(8)
    assert all(get(store, ns, *range(200, 210)))
    assert eventually(lambda: store.stats().objects == 110 - SLOTS), "nothing was given back"
    assert store.stats().drives_in_service == 1
    close_good(store)


def test_a_transfer_that_the_system_cuts_short_is_not_taken_for_whole(disk: Path) -> None:
    """RLIMIT_FSIZE makes a real short write and then EFBIG (B04)."""
    script = f"""
import resource, signal
from pathlib import Path
from tests.store.kit import *
store = open_store(Path({str(disk)!r}), max_size=2 * MIB)
ns = store.attach(namespace())
store_pages(store, ns, *range(4))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024 + 512, resource.RLIM_INFINITY))
put(store, ns, *range(10, 30))
store.drain(8)
found = get(store, ns, *range(30))
assert all(found[:4]) and found[10:] == lookup(store, ns, *range(10, 30)), found
assert value(store, "tutti_call_errors") == 0
"""
    _run(script)


def _run(script: str) -> None:
    import subprocess
    import sys

    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_seeded_faults_of_every_kind_never_give_wrong_bytes_nor_stop_the_store(disk: Path) -> None:
    weather = Weather()
    store = open_store(disk, seam=weather, max_size=4 * MIB)
    ns = store.attach(namespace())
    rare = EVERY_BLOCK // 400
    kinds = (Fault.ERROR, Fault.ZERO, Fault.SHORT, Fault.TORN, Fault.LATE)
    for seed in range(40):
        weather.plan = FaultPlan(dict.fromkeys(kinds, rare), seed=seed)
        start = 17 * seed
        put(store, ns, *range(start, start + 30))
        get(store, ns, *range(max(0, start - 60), start + 30))
    weather.plan = None
    assert store.drain(8)
    assert value(store, "tutti_bytes", op="read") > 100 * sum(TENSORS)
    assert eventually(lambda: store.stats().drives_in_service == 1)
    store.verify(repair=True)
    assert eventually(lambda: all(put(store, ns, *range(2000, 2020))) and store.drain(8) and _all(store, ns))
    close_good(store)


def _all(store: ObjectStore, ns: int) -> bool:
    return all(get(store, ns, *range(2000, 2020)))


def test_calls_end_at_their_deadline_whatever_hangs(disk: Path) -> None:
    weather = Weather()
    store, ns = filled(disk, weather, 60, staging_size=MIB)
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK})
    pages = Pages(60).fill(*range(100, 160))
    began = soon(0)
    for _ in range(3):
        store.get(ns, keys(*range(60)), pages.rows, soon(0.2))
        store.put(ns, keys(*range(100, 160)), pages.rows, soon(0.2))
        lookup(store, ns, *range(60))
    assert soon(0) - began < 10
    weather.plan.gate.open()
    weather.plan = None
    assert eventually(lambda: store.stats().drives_in_service == 1)
    assert all(get(store, ns, *range(60)))
    close_good(store)
