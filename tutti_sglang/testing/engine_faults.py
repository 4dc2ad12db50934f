"""Engine suite: a drive with bad blocks. What an engine must answer is known beforehand from the plan."""

import errno

import numpy as np
import pytest

from tutti_sglang.engine.batch import Batch, IoClass, Operation
from tutti_sglang.testing.engine_case import EngineCase, Start, run
from tutti_sglang.testing.faults import EVERY_BLOCK, READS, WRITES, Fault, FaultPlan
from tutti_sglang.testing.rig import BLOCK, MEMORY, SEGMENT, Rig

SEEDS = range(12)


class EngineFaults(EngineCase):
    """Errors, short and late transfers, lost bytes."""

    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_drive_with_bad_blocks_costs_exactly_what_lies_on_them(self, rig: Rig, start: Start, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rates = {
            Fault.ERROR: int(rng.integers(3000)),
            Fault.ZERO: int(rng.integers(2000)),
            Fault.SHORT: int(rng.integers(20_000)),
            Fault.LATE: int(rng.integers(300)),
        }
        error = int(rng.choice([errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.ETIMEDOUT]))
        plan = FaultPlan(rates, seed=seed, error=error)
        batch = _random_batch(rig, rng)
        rig.memory[:] = rng.integers(256, size=MEMORY, dtype=np.uint8)
        written = rig.memory.copy()
        wanted = plan.expected(batch)
        results = run(
            start(depth=int(rng.integers(1, 9)), max_io=int(rng.choice([64, 256, 1024])) << 10, plan=plan), batch
        )
        assert results.tolist() == wanted.tolist(), f"seed {seed}"
        for i in np.flatnonzero(results > 0).tolist():
            if batch["operation"][i] == Operation.READ:
                assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all(), f"seed {seed}, IOCTX {i}"
            else:
                start_at = int(batch["address"][i]) - rig.region.address
                assert (rig.on_disk(batch, i) == written[start_at : start_at + results[i]]).all(), f"seed {seed}, {i}"

    @pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENXIO])
    def test_neighbours_of_a_bad_block_are_served(self, rig: Rig, start: Start, error: int) -> None:
        plan = FaultPlan({Fault.ERROR: EVERY_BLOCK}, begin=10 * BLOCK, end=11 * BLOCK, drive=0, error=error)
        batch = rig.batch(np.arange(64) * BLOCK)
        wanted = [BLOCK] * 64
        wanted[10] = -error
        assert run(start(max_io=1 << 20, plan=plan), batch).tolist() == wanted
        for i in (*range(10), *range(11, 64)):
            assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()

    def test_a_dead_drive_answers_for_itself_alone(self, rig: Rig, start: Start) -> None:
        engine = start(plan=FaultPlan({Fault.ERROR: EVERY_BLOCK}, drive=1, error=errno.ENODEV))
        batch = rig.batch(np.repeat(np.arange(100), 2) * BLOCK, drives=np.tile([0, 1], 100))
        assert run(engine, batch).tolist() == [BLOCK, -errno.ENODEV] * 100

    def test_an_error_does_not_stick(self, rig: Rig, start: Start) -> None:
        engine = start(plan=FaultPlan({Fault.ERROR: EVERY_BLOCK}, operations=WRITES))
        for _ in range(3):
            assert run(engine, rig.batch([0], operation=Operation.WRITE), IoClass.WRITE).tolist() == [-errno.EIO]
            assert run(engine, rig.batch([0])).tolist() == [BLOCK]

    @pytest.mark.parametrize("operation", Operation)
    def test_short_transfers_are_resumed(self, rig: Rig, start: Start, operation: Operation) -> None:
        engine = start(max_io=1 << 20, plan=FaultPlan({Fault.SHORT: EVERY_BLOCK}))
        lengths = np.array([5 * BLOCK, 100, 3 * BLOCK - 100, 8 * BLOCK])
        batch = rig.batch(np.cumsum(lengths) - lengths, lengths, operation)
        rig.memory[:] = 9
        assert run(engine, batch).tolist() == lengths.tolist()
        for i in range(len(batch)):
            there = rig.in_memory(batch, i) if operation == Operation.READ else rig.on_disk(batch, i)
            assert (there == (rig.expected(batch, i) if operation == Operation.READ else 9)).all()

    def test_no_progress_is_an_error(self, rig: Rig, start: Start) -> None:
        engine = start(plan=FaultPlan({Fault.ZERO: EVERY_BLOCK}, begin=3 * BLOCK, end=4 * BLOCK, drive=0))
        batch = rig.batch([0, 4 * BLOCK, 5 * BLOCK], [4 * BLOCK, BLOCK, BLOCK])
        assert run(engine, batch).tolist() == [-errno.EIO, BLOCK, BLOCK]

    @pytest.mark.parametrize("operations", [READS, WRITES])
    def test_torn_bytes_are_not_an_engines_to_notice(self, rig: Rig, start: Start, operations: int) -> None:
        """The drive said that it moved them: only a checksum knows better. All other bytes must be right."""
        plan = FaultPlan({Fault.TORN: EVERY_BLOCK}, begin=5 * BLOCK, end=6 * BLOCK, drive=0, operations=operations)
        operation = Operation.READ if operations == READS else Operation.WRITE
        batch = rig.batch([0, 4 * BLOCK], 4 * BLOCK, operation)
        rig.memory[:] = 9
        assert run(start(plan=plan), batch).tolist() == [4 * BLOCK] * 2
        for i in range(2):
            moved = rig.in_memory(batch, i) if operation == Operation.READ else rig.on_disk(batch, i)
            new, old = rig.expected(batch, i), np.full(4 * BLOCK, 9, dtype=np.uint8)
            if operation == Operation.WRITE:
                new, old = old, new
            for block in range(4):
                span = slice(block * BLOCK, (block + 1) * BLOCK)
                assert (moved[span] == (old if (i, block) == (1, 1) else new)[span]).all()


def _random_batch(rig: Rig, rng: np.random.Generator) -> Batch:
    """Disjoint IOCTX over all drives, some of them neighbours, reads and writes, 1 byte to 9 blocks."""
    offsets, lengths, drives = [], [], []
    for drive in range(rig.drives):
        for segment in range(rig.segments):
            at = int(rng.integers(3)) * BLOCK
            while at < SEGMENT:
                whole = int(rng.integers(1, 10)) * BLOCK
                length = min(whole if rng.random() < 0.7 else int(rng.integers(1, whole)), SEGMENT - at)
                offsets.append(segment * SEGMENT + at)
                lengths.append(length)
                drives.append(drive)
                at += length if rng.random() < 0.8 else length + int(rng.integers(1, 2 * BLOCK))
    operations = np.repeat(rng.integers(2, size=len(offsets) // 5 + 1), 5)[: len(offsets)]
    batch = rig.batch(offsets, lengths, operations, drives=drives)
    return batch if rng.random() < 0.5 else batch[rng.permutation(len(batch))]
