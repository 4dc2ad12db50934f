"""What is booked for a batch: an errno per object, counters by kind, and blame only where it belongs."""

import errno
import logging
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.engine.batch import IN_PROGRESS, IOCTX_DTYPE, Operation
from tutti_sglang.engine.moving import Moved
from tutti_sglang.metrics import Metrics
from tutti_sglang.store.drives import Drive
from tutti_sglang.store.outcome import GOOD, UNANSWERED, Ledger, codes
from tutti_sglang.store.report import Reporter


@pytest.fixture
def drives(tmp_path: Path) -> dict[int, Drive]:
    return {number: Drive(number, str(tmp_path), -1, True, "", 0) for number in (0, 1)}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


@pytest.fixture
def ledger(drives: dict[int, Drive], metrics: Metrics) -> Ledger:
    return Ledger(drives, metrics, Reporter(logging.getLogger("test")))


def moved(objects: int, **errors: int) -> Moved:
    """Objects with a tensor on each of two drives. All served, but object n's tensor on drive m, `on_m`, which ends as
    named."""
    failed = np.zeros(len(errors), dtype=IOCTX_DTYPE)
    for place, (name, result) in enumerate(errors.items()):
        failed["tag"][place], failed["drive"][place] = map(int, name[1:].split("_"))
        failed["length"][place], failed["result"][place] = 4096, result
    return Moved(failed, np.full(2, objects, np.uint64), np.full(2, objects * 4096, np.uint64))


def test_an_object_has_the_error_of_any_of_its_parts_and_one_without_answer_before_all() -> None:
    found = codes(moved(4, o1_0=-errno.EIO, o2_0=IN_PROGRESS, o2_1=-errno.EDQUOT, o3_1=100), 4)
    assert found.tolist() == [GOOD, errno.EIO, UNANSWERED, errno.ENODATA]


def test_only_the_drive_that_failed_is_blamed(ledger: Ledger, drives: dict[int, Drive], metrics: Metrics) -> None:
    for _ in range(10):
        ledger.book(moved(4, **{f"o{n}_0": -errno.EIO for n in range(4)}), Operation.READ)
    assert not drives[0].reads.in_service
    assert drives[0].writes.in_service
    assert drives[1].reads.in_service
    assert metrics.value("tutti_io_errors", drive="0", op="read", kind="EIO") == 40
    assert metrics.value("tutti_io_errors", drive="1") == 0
    assert metrics.value("tutti_drive_in_service") == 0


def test_a_drive_that_had_nothing_to_do_is_not_judged(ledger: Ledger, drives: dict[int, Drive]) -> None:
    for _ in range(3):
        ledger.book(moved(4, **{f"o{n}_0": -errno.EIO for n in range(4)}), Operation.READ)
        ledger.book(Moved(moved(0).failed, np.array([0, 4], np.uint64), np.array([0, 4], np.uint64)), Operation.READ)
    ledger.book(moved(4, **{f"o{n}_0": -errno.EIO for n in range(4)}), Operation.READ)
    assert not drives[0].reads.in_service


@pytest.mark.parametrize(
    "code", [errno.ETIMEDOUT, errno.ECANCELED, errno.ENODATA, errno.ENOSPC, errno.EBADF, errno.EFAULT, errno.EOPNOTSUPP]
)
def test_what_is_not_the_drives_fault_is_counted_and_not_blamed(
    ledger: Ledger, drives: dict[int, Drive], metrics: Metrics, code: int
) -> None:
    for _ in range(50):
        ledger.book(moved(4, **{f"o{n}_0": -code for n in range(4)}), Operation.WRITE)
    assert drives[0].writes.in_service
    assert metrics.value("tutti_io_errors", kind=errno.errorcode[code]) == 200


def test_a_hang_takes_the_drive_out_at_once_for_both(ledger: Ledger, drives: dict[int, Drive]) -> None:
    ledger.book(moved(4, o0_1=IN_PROGRESS), Operation.READ)
    assert not drives[1].reads.in_service
    assert not drives[1].writes.in_service
    assert drives[0].serves
