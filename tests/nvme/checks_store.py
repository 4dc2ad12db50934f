"""A store on a raw drive, and the engine under it: written, closed, opened, verified; refused where it must be."""

import errno
import os
import shutil
import time
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from tests.nvme.bench import PATIENCE, WORK, Bench, faults
from tests.store import kit
from tutti_sglang.engine.batch import IN_PROGRESS, IOCTX_DTYPE, Batch, IoClass, Operation
from tutti_sglang.engine.gio import GioEngine
from tutti_sglang.engine.gio_backend import RawDrives
from tutti_sglang.errors import ForeignStoreError
from tutti_sglang.gio.vfio import extent
from tutti_sglang.memory import Region
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import ObjectStore

MIB = 1 << 20
INDEX = Path("/run/index")
LAST = Path("/run/last")
NUMBERS = range(100)
"""Pages in the store when the guest ends; the host compares them on the drive's image."""


def open_store(bench: Bench, serial: str, **changes: object) -> ObjectStore:
    settings = {"engine": "gio", "index_dir": str(INDEX), "queue_depth": 8} | changes
    serial, _, nsid = serial.partition("/")
    config = kit.config(f"vfio:{bench.addresses[serial]}/{nsid or 1}", **settings)  # type: ignore[arg-type]
    bench.stores.append(ObjectStore(config, metrics=Metrics(CollectorRegistry())))
    return bench.stores[-1]


def refused(bench: Bench, serial: str, **changes: object) -> str:
    try:
        open_store(bench, serial, **changes).close()
    except ForeignStoreError as error:
        return str(error)
    raise AssertionError("it was taken")


def store_pages(store: ObjectStore, ns: int, numbers: range) -> None:
    """As kit.store_pages, with patience: an emulated machine on a busy host is slow."""
    assert all(kit.put(store, ns, *numbers))
    assert store.drain(120)


def check_a_drive_with_a_file_system_is_refused_and_not_touched(bench: Bench) -> None:
    said = refused(bench, "GUARD", index_dir="/run/other")
    assert "holds an ext2/3/4 file system" in said
    assert "serial GUARD" in said


def check_a_drive_with_anything_on_it_is_refused_unless_told_to_take_it(bench: Bench) -> None:
    assert "holds something at byte" in refused(bench, "WIDE")
    assert "is not empty" in refused(bench, "WIDE", overwrite=("another",))
    store = open_store(bench, "WIDE", overwrite=("WIDE",))
    kit.close_good(store)


def check_a_store_is_written_closed_opened_and_verified(bench: Bench) -> None:
    for round_ in range(3):
        store = open_store(
            bench, "WIDE", fsync=("none", "batch", "each")[round_], doorbell=("gpu", "relay")[round_ % 2]
        )
        ns = store.attach(kit.namespace())
        store_pages(store, ns, range(round_ * 30, round_ * 30 + 40))
        found = kit.get(store, ns, *range(round_ * 30 + 40))
        assert all(found), (round_, found, store._parts.metrics.value("tutti_io_errors"))
        kit.close_good(store)


def check_segments_come_and_go_in_the_places_of_others(bench: Bench) -> None:
    store = open_store(bench, "WIDE")
    others = [store.attach(kit.namespace(f"model {number}")) for number in range(4)]
    for number, ns in enumerate(others):
        store_pages(store, ns, range(1000 * number, 1000 * number + 100))
    kept = sum(sum(kit.get(store, ns, *range(1000 * i, 1000 * i + 100))) for i, ns in enumerate(others))
    assert 0 < kept < 400, "more was put than fits"
    kit.close_good(store)


def check_a_store_of_another_index_is_refused(bench: Bench) -> None:
    other = "/run/another"
    store = open_store(bench, "MAIN/2", index_dir=other, overwrite=("MAIN",))
    assert store.close()
    assert "another store" in refused(bench, "MAIN/2")
    assert bench.image("half", 0, 1) == b"{"


def check_a_store_whose_index_is_lost_starts_empty(bench: Bench) -> None:
    store = open_store(bench, "WIDE", index_dir=str(LAST))
    ns = store.attach(kit.namespace())
    assert not any(kit.get(store, ns, *range(100)))
    kit.close_good(store)


def check_the_last_pages_are_there_when_the_guest_ends(bench: Bench) -> None:
    store = open_store(bench, "WIDE", index_dir=str(LAST))
    ns = store.attach(kit.namespace("last"))
    store_pages(store, ns, NUMBERS)
    assert all(kit.get(store, ns, *NUMBERS))
    kit.close_good(store)
    shutil.copytree(LAST, WORK / "index", ignore=shutil.ignore_patterns("*-shm"))


class Rig:
    """The engine over the slow drive, one segment attached."""

    def __init__(self, bench: Bench, **options: float) -> None:
        self.device = bench.open("SLOW", 1)
        self.region = Region(MIB)
        raw = RawDrives({0: (self.device, MIB)}, [self.region], **options)  # type: ignore[arg-type]
        self.engine = GioEngine(MIB, 8, 64 << 10, raw=raw)
        self.fd = os.open("/run/extent", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        extent.write(self.fd, 2 * MIB, MIB)
        self.engine.attach(0, 5, self.fd)

    def batch(self, count: int, operation: Operation = Operation.READ) -> Batch:
        batch = np.zeros(count, dtype=IOCTX_DTYPE)
        places = np.arange(count, dtype=np.uint64) * np.uint64(8192)  # no neighbours, which would be one command
        batch["address"], batch["offset"] = places + np.uint64(self.region.address), places + np.uint64(5 * MIB)
        batch["length"], batch["operation"] = 4096, operation
        return batch

    def close(self) -> None:
        assert self.engine.close(PATIENCE)
        self.device.close()
        os.close(self.fd)


def check_a_drive_that_hangs_keeps_its_memory_and_gives_it_back_later(bench: Bench) -> None:
    rig = Rig(bench)
    ticket = rig.engine.submit(rig.batch(40), IoClass.DEMAND, time.monotonic() + 0.5)
    early = rig.engine.wait(ticket, 0.6)
    assert (early == IN_PROGRESS).any(), "nothing hung"
    assert not rig.engine.detach(0, 5, 0)
    late = rig.engine.wait(ticket, PATIENCE)
    assert set(late.tolist()) <= {4096, -errno.ETIMEDOUT}
    assert -errno.ETIMEDOUT in late
    assert 4096 in late
    assert rig.engine.detach(0, 5)
    rig.close()


def check_a_drive_that_hangs_too_long_is_reset_and_serves_again(bench: Bench) -> None:
    rig = Rig(bench, reset_seconds=0.3)
    content = bench.bytes(4096)
    rig.region.view[:4096] = content
    assert rig.engine.wait(rig.engine.submit(rig.batch(1, Operation.WRITE), IoClass.WRITE, kit.soon()), PATIENCE)[0] > 0
    ticket = rig.engine.submit(rig.batch(40), IoClass.DEMAND, kit.soon())
    results = rig.engine.wait(ticket, PATIENCE).tolist()
    assert -errno.EIO in results, "it was not reset"
    assert IN_PROGRESS not in results
    rig.region.view[:] = 0

    def read() -> bool:
        ticket = rig.engine.submit(rig.batch(1), IoClass.DEMAND, kit.soon())
        return rig.engine.wait(ticket, PATIENCE).tolist() == [4096]

    # The throttle gives credit for one command a time; on a busy host one of them may take longer than a reset waits.
    assert kit.eventually(read, PATIENCE)
    assert (rig.region.view[:4096] == content).all()
    assert bench.image("slow", 2 * MIB, 4096) == content.tobytes()
    rig.close()


def check_closing_ends_what_hangs(bench: Bench) -> None:
    rig = Rig(bench)
    ticket = rig.engine.submit(rig.batch(40), IoClass.DEMAND, kit.soon())
    assert rig.engine.close(0.2), "memory is not the drive's any more"
    results = rig.engine.wait(ticket, 0).tolist()
    assert IN_PROGRESS not in results
    rig.device.close()
    os.close(rig.fd)
    assert not faults(), "the drive went on after it was stopped"
