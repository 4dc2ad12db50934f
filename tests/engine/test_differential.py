"""Every engine does the same to memory and drives, byte by byte, on healthy and on faulty drives."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tutti_sglang.engine import Engine, IoClass, Operation
from tutti_sglang.engine.batch import Batch
from tutti_sglang.engine.system import SYSTEM
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.engine.uring import UringEngine, uring_refused
from tutti_sglang.kernels import native
from tutti_sglang.memory import Region
from tutti_sglang.testing.engine_case import PATIENCE, run
from tutti_sglang.testing.faults import Fault, FaultPlan, FaultySystem
from tutti_sglang.testing.rig import BLOCK, MEMORY, SEGMENT, Rig

SEEDS = range(12)  # even ones with O_DIRECT
ROUNDS = 3


def make_engine(kind: str, memory: Region, depth: int, max_io: int, plan: FaultPlan | None) -> Engine:
    if kind == "threads":
        return ThreadsEngine(SEGMENT, depth, max_io, FaultySystem(plan) if plan else SYSTEM)
    faults = plan.packed() if plan else None
    pool = kind == "pool"
    return UringEngine(SEGMENT, queue_depth=depth, max_io=max_io, staging=memory, faults=faults, pool=pool)


def random_batch(rig: Rig, rng: np.random.Generator, unit: int) -> Batch:
    """Disjoint IOCTX in multiples of `unit` bytes: runs of neighbours in any order, reads and writes, up to 1 MiB."""
    offsets, lengths, drives = [], [], []
    for drive in range(rig.drives):
        for segment in range(rig.segments):
            at = int(rng.integers(4)) * unit
            largest = int(rng.choice([2, 16, SEGMENT // BLOCK])) * BLOCK // unit
            while at < SEGMENT:
                length = min(int(rng.integers(1, largest + 1)) * unit, SEGMENT - at)
                offsets.append(segment * SEGMENT + at)
                lengths.append(length)
                drives.append(drive)
                at += length + int(rng.random() < 0.2) * unit
    operations = np.repeat(rng.integers(2, size=len(offsets) // 4 + 1), 4)[: len(offsets)]
    batch = rig.batch(offsets, lengths, operations, drives=drives)
    return batch if rng.random() < 0.5 else batch[rng.permutation(len(batch))]


def undefined(rig: Rig, batch: Batch, failed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(MEMORY,) and (drives, bytes): what a failed read or write may have left in any state."""
    memory = np.zeros(MEMORY, dtype=np.bool_)
    drives = np.zeros(rig.content.shape, dtype=np.bool_)
    for each in batch[failed]:
        length = int(each["length"])
        if each["operation"] == Operation.READ:
            start = int(each["address"]) - rig.region.address
            memory[start : start + length] = True
        else:
            drives[int(each["drive"]), int(each["offset"]) : int(each["offset"]) + length] = True
    return memory, drives


def outcome(kind: str, folder: Path, seed: int, direct: bool) -> list[tuple[list[int], bytes, bytes]]:
    """Rounds of (results, memory, drives) of one engine; everything else follows from the seed."""
    rng = np.random.default_rng(seed)
    rig = Rig(folder, flags=os.O_DIRECT if direct else 0)
    rates = {fault: int(rng.integers(2000)) for fault in (Fault.ERROR, Fault.ZERO, Fault.SHORT, Fault.TORN)}
    plan = FaultPlan(rates, seed=seed, error=errno.EIO) if rng.random() < 0.7 else None
    engine = make_engine(kind, rig.region, int(rng.integers(1, 17)), int(rng.choice([16, 256, 1024])) << 10, plan)
    rig.attach(engine)
    rounds = []
    for _ in range(ROUNDS):
        batch = random_batch(rig, rng, BLOCK if direct else 1 << int(rng.integers(6, 13)))
        rig.memory[:] = rng.integers(256, size=MEMORY, dtype=np.uint8)
        results = run(engine, batch, IoClass(int(rng.integers(3))))
        drives = np.array([np.frombuffer(b"".join(p.read_bytes() for p in paths), np.uint8) for paths in rig.paths])
        lost_memory, lost_drives = undefined(rig, batch, results < 0)
        rounds.append(
            (
                results.tolist(),
                np.where(lost_memory, 0, rig.memory).tobytes(),
                np.where(lost_drives, 0, drives).tobytes(),
            )
        )
        for drive, paths in enumerate(rig.paths):  # the next round starts from what is the same for all
            for segment, path in enumerate(paths):
                span = slice(segment * SEGMENT, (segment + 1) * SEGMENT)
                path.write_bytes(np.where(lost_drives, 0, drives)[drive, span].tobytes())
    assert engine.close(PATIENCE)
    rig.close()
    return rounds


@pytest.mark.skipif(native.library() is None, reason=native.unavailable_reason())
@pytest.mark.parametrize("kind", ["uring", "pool"])
@pytest.mark.parametrize("seed", SEEDS)
def test_native_engines_do_what_python_does(tmp_path: Path, seed: int, kind: str) -> None:
    if kind == "uring" and uring_refused():
        pytest.skip(uring_refused())
    direct = seed % 2 == 0
    try:
        reference = outcome("threads", tmp_path, seed, direct)
    except OSError as error:
        pytest.skip(f"{tmp_path} refuses O_DIRECT: {error}")
    for number, (mine, theirs) in enumerate(zip(reference, outcome(kind, tmp_path, seed, direct), strict=True)):
        assert theirs[0] == mine[0], f"results of round {number}"
        assert theirs[1] == mine[1], f"memory after round {number}"
        assert theirs[2] == mine[2], f"drives after round {number}"
