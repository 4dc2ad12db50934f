"""A fault plan is a pure function of what it names, and the faulty system does what it says."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tutti_sglang.engine.batch import IOCTX_DTYPE, Operation
from tutti_sglang.engine.system import Iovecs, Place
from tutti_sglang.testing.faults import (
    BLOCK,
    EVERY_BLOCK,
    PACKED_DTYPE,
    WRITES,
    Fault,
    FaultPlan,
    FaultySystem,
)

BLOCKS = 4096
RATES = {Fault.ERROR: 3000, Fault.ZERO: 2000, Fault.SHORT: 6000, Fault.TORN: 1000, Fault.LATE: 500, Fault.STALL: 100}


def iovecs(*pieces: np.ndarray) -> Iovecs:
    return np.array([(piece.ctypes.data, piece.nbytes) for piece in pieces], dtype=np.uint64)


@pytest.fixture
def fd(tmp_path: Path):
    fd = os.open(tmp_path / "segment", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, bytes(range(256)) * (16 * BLOCK // 256), 0)
    yield fd
    os.close(fd)


def test_rates_are_met_and_every_draw_depends_on_everything() -> None:
    faults = FaultPlan(RATES, seed=1).faults(0, 0, 1 << 16, Operation.READ)
    for fault, rate in RATES.items():
        assert abs(int((faults == fault).sum()) - rate) < 5 * rate**0.5 + 5
    others = [
        FaultPlan(RATES, seed=2).faults(0, 0, 1 << 16, Operation.READ),
        FaultPlan(RATES, seed=1).faults(1, 0, 1 << 16, Operation.READ),
        FaultPlan(RATES, seed=1).faults(0, 1 << 16, 1 << 16, Operation.READ),
        FaultPlan(RATES, seed=1).faults(0, 0, 1 << 16, Operation.WRITE),
    ]
    assert all((other != faults).mean() > 0.2 for other in others)
    assert (FaultPlan(RATES, seed=1).faults(0, 100, 50, Operation.READ) == faults[100:150]).all()


def test_the_draws_are_part_of_the_contract_with_native_engines() -> None:
    faults = FaultPlan(RATES, seed=20250211).faults(3, 7, 64, Operation.WRITE)
    assert "".join(map(str, faults.tolist())) == "0000300200000100000030000000000001000000000300000300100000000330"


def test_limits_of_place_drive_and_operation() -> None:
    plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, begin=2 * BLOCK, end=4 * BLOCK, drive=1, operations=WRITES)
    assert plan.faults(1, 0, 6, Operation.WRITE).tolist() == [0, 0, 1, 1, 0, 0]
    assert not plan.faults(0, 0, 6, Operation.WRITE).any()
    assert not plan.faults(1, 0, 6, Operation.READ).any()


def test_packed_says_the_same_in_72_bytes() -> None:
    plan = FaultPlan({Fault.SHORT: 5, Fault.STALL: 9}, seed=4, begin=BLOCK, drive=2, error=errno.ENOSPC, delay=0.5)
    packed = plan.packed()
    assert PACKED_DTYPE.itemsize == packed.nbytes == 72
    assert packed["rates"].tolist() == [[0, 0, 5, 0, 0, 9]]
    assert (packed["seed"][0], packed["begin"][0], packed["end"][0], packed["drive"][0]) == (4, BLOCK, 1 << 63, 2)
    assert (packed["error"][0], packed["delay_us"][0], packed["operations"][0]) == (errno.ENOSPC, 500_000, 3)
    assert packed["gate"][0] == plan.gate.word.ctypes.data


@pytest.mark.parametrize(
    ("fault", "bad", "moved"),
    [
        (Fault.NONE, 0, 4 * BLOCK),
        (Fault.ERROR, 3, -errno.EIO),
        (Fault.ZERO, 2, 2 * BLOCK),
        (Fault.ZERO, 0, 0),
        (Fault.SHORT, 0, BLOCK),
        (Fault.SHORT, 1, BLOCK),
        (Fault.TORN, 0, BLOCK),
        (Fault.TORN, 3, 3 * BLOCK),
        (Fault.LATE, 0, 4 * BLOCK),
    ],
)
def test_each_fault_does_what_it_says(fd: int, fault: Fault, bad: int, moved: int) -> None:
    begin = (1000 + bad) * BLOCK
    plan = FaultPlan({fault: EVERY_BLOCK} if fault else {}, begin=begin, end=begin + BLOCK)
    memory = np.full(4 * BLOCK, 99, dtype=np.uint8)
    place = Place(fd, 4 * BLOCK, 0, 1000 * BLOCK)
    halves = iovecs(memory[: BLOCK + 8], memory[BLOCK + 8 :])
    assert FaultySystem(plan).transfer(Operation.READ, place, halves) == moved
    real = 0 if moved < 0 or (fault, bad) == (Fault.TORN, 0) else moved
    assert (memory[:real].reshape(-1, 256) == np.arange(256)).all()
    assert (memory[real:] == 99).all()


def test_a_stalled_transfer_goes_on_when_the_gate_opens(fd: int) -> None:
    plan = FaultPlan({Fault.STALL: EVERY_BLOCK})
    memory = np.zeros(BLOCK, dtype=np.uint8)
    moved: list[int] = []
    call = (Operation.READ, Place(fd, 0, 0, 0), iovecs(memory))
    thread = threading.Thread(target=lambda: moved.append(FaultySystem(plan).transfer(*call)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    plan.gate.open()
    thread.join(30)
    assert moved == [BLOCK]


def test_expected_results_follow_from_the_blocks() -> None:
    plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, begin=BLOCK, end=2 * BLOCK, error=errno.ENODATA)
    batch = np.zeros(3, dtype=IOCTX_DTYPE)
    batch["offset"] = [0, 0, 2 * BLOCK]
    batch["length"] = [BLOCK, 2 * BLOCK, BLOCK]
    assert plan.expected(batch).tolist() == [BLOCK, -errno.ENODATA, BLOCK]
    assert FaultPlan({Fault.ZERO: EVERY_BLOCK}).expected(batch).tolist() == [-errno.EIO] * 3
