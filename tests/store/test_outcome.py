"""What is booked for a batch: an errno per object, counters by kind, and blame only where it belongs."""

import errno
import logging
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.engine.batch import IN_PROGRESS, IoClass, Operation
from tutti_sglang.geometry import Geometry
from tutti_sglang.metrics import Metrics
from tutti_sglang.store.drives import Drive
from tutti_sglang.store.outcome import GOOD, UNANSWERED, Ledger, codes
from tutti_sglang.store.plan import Plan, object_addresses, plan
from tutti_sglang.store.report import Reporter
from tutti_sglang.store.slots import slot_ids

GEOMETRY = Geometry((4096, 4096), 1, (0, 1), 1 << 20)


@pytest.fixture
def drives(tmp_path: Path) -> dict[int, Drive]:
    return {number: Drive(number, str(tmp_path), -1, True, "", 0) for number in (0, 1)}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


@pytest.fixture
def ledger(drives: dict[int, Drive], metrics: Metrics) -> Ledger:
    return Ledger(drives, metrics, Reporter(logging.getLogger("test")))


def planned(objects: int) -> Plan:
    slots = slot_ids(1, np.arange(objects))
    return plan({1: GEOMETRY}, slots, object_addresses(0, objects, 8192), Operation.READ, IoClass.DEMAND)


def results(batch: Plan, **errors: int) -> np.ndarray:
    """All served, but object n_m's tensor on drive m, which ends as named."""
    found = batch.batch["length"].astype(np.int32)
    for name, result in errors.items():
        number, drive = map(int, name[1:].split("_"))
        found[(batch.owner == number) & (batch.batch["drive"] == drive)] = result
    return found


def test_an_object_has_the_error_of_any_of_its_parts_and_one_without_answer_before_all() -> None:
    batch = planned(4)
    found = codes(batch, results(batch, o1_0=-errno.EIO, o2_0=IN_PROGRESS, o2_1=-errno.EDQUOT, o3_1=100), 4)
    assert found.tolist() == [GOOD, errno.EIO, UNANSWERED, errno.ENODATA]


def test_only_the_drive_that_failed_is_blamed(ledger: Ledger, drives: dict[int, Drive], metrics: Metrics) -> None:
    batch = planned(4)
    for _ in range(10):
        ledger.book(batch, results(batch, **{f"o{n}_0": -errno.EIO for n in range(4)}), Operation.READ)
    assert not drives[0].reads.in_service
    assert drives[0].writes.in_service
    assert drives[1].reads.in_service
    assert metrics.value("tutti_io_errors", drive="0", op="read", kind="EIO") == 40
    assert metrics.value("tutti_io_errors", drive="1") == 0
    assert metrics.value("tutti_drive_in_service") == 0


@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.ECANCELED, errno.ENODATA, errno.ENOSPC, errno.EBADF])
def test_what_is_not_the_drives_fault_is_counted_and_not_blamed(
    ledger: Ledger, drives: dict[int, Drive], metrics: Metrics, code: int
) -> None:
    batch = planned(4)
    for _ in range(50):
        ledger.book(batch, results(batch, **{f"o{n}_0": -code for n in range(4)}), Operation.WRITE)
    assert drives[0].writes.in_service
    assert metrics.value("tutti_io_errors", kind=errno.errorcode[code]) == 200


def test_a_hang_takes_the_drive_out_at_once_for_both(ledger: Ledger, drives: dict[int, Drive]) -> None:
    batch = planned(4)
    ledger.book(batch, results(batch, o0_1=IN_PROGRESS), Operation.READ)
    assert not drives[1].reads.in_service
    assert not drives[1].writes.in_service
    assert drives[0].serves
