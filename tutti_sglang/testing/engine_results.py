"""Engine suite: every byte at its place, every result at its IOCTX, errors where they belong and only there."""

import errno
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import IOCTX_DTYPE, IoClass, Operation
from tutti_sglang.testing.engine_case import PATIENCE, EngineCase, Start, later, run
from tutti_sglang.testing.guard import GuardedRegion
from tutti_sglang.testing.rig import BLOCK, MEMORY, SEGMENT, Rig


class EngineResults(EngineCase):
    """Reads, writes, partial failures."""

    def test_it_is_an_engine(self, start: Start) -> None:
        engine = start()
        assert isinstance(engine, Engine)
        assert engine.name

    @pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
    def test_reads_bring_the_bytes_of_each_ioctx(self, tmp_path: Path, direct: bool) -> None:
        try:
            rig = Rig(tmp_path, drives=3, flags=os.O_DIRECT if direct else 0)
        except OSError as error:
            pytest.skip(f"{tmp_path} refuses O_DIRECT: {error}")
        engine = self.create(rig.region, depth=4, max_io=64 << 10)
        rig.attach(engine)
        drives, offsets = rig.blocks(np.random.default_rng(1), 1200)
        batch = rig.batch(offsets, drives=drives)
        assert (run(engine, batch) == BLOCK).all()
        for i in range(len(batch)):
            assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()
        assert engine.close(PATIENCE)
        rig.close()

    @pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
    def test_writes_change_their_bytes_and_no_others(self, tmp_path: Path, direct: bool) -> None:
        try:
            rig = Rig(tmp_path, flags=os.O_DIRECT if direct else 0)
        except OSError as error:
            pytest.skip(f"{tmp_path} refuses O_DIRECT: {error}")
        engine = self.create(rig.region, depth=4, max_io=64 << 10)
        rig.attach(engine)
        rng = np.random.default_rng(2)
        rig.memory[:] = rng.integers(256, size=MEMORY, dtype=np.uint8)
        drives, offsets = rig.blocks(rng, 600)
        batch = rig.batch(offsets, operation=Operation.WRITE, drives=drives)
        wanted = rig.content.copy()
        for i in range(len(batch)):
            wanted[drives[i], offsets[i] : offsets[i] + BLOCK] = rig.in_memory(batch, i)
        assert (run(engine, batch, IoClass.WRITE) == BLOCK).all()
        for drive, paths in enumerate(rig.paths):
            assert b"".join(path.read_bytes() for path in paths) == wanted[drive].tobytes()
        assert engine.close(PATIENCE)
        rig.close()

    def test_one_batch_may_read_and_write(self, rig: Rig, start: Start) -> None:
        rng = np.random.default_rng(3)
        drives, offsets = rig.blocks(rng, 400)
        operations = rng.integers(2, size=400)
        batch = rig.batch(offsets, operation=operations, drives=drives)
        rig.memory[:] = 77
        assert (run(start(), batch) == BLOCK).all()
        for i, operation in enumerate(operations.tolist()):
            there = rig.on_disk(batch, i) if operation == Operation.WRITE else rig.in_memory(batch, i)
            assert (there == (77 if operation == Operation.WRITE else rig.expected(batch, i))).all()

    @pytest.mark.parametrize("max_io", [BLOCK, 64 << 10, 1 << 20])
    def test_neighbours_on_the_drive_scatter_into_memory(self, rig: Rig, start: Start, max_io: int) -> None:
        rng = np.random.default_rng(4)
        lengths = rng.integers(1, 3000, size=600)
        offsets = np.cumsum(lengths) - lengths
        kept = offsets + lengths <= SEGMENT
        offsets, lengths = offsets[kept], lengths[kept]
        order = rng.permutation(len(lengths))
        places = np.empty_like(lengths)
        places[order] = np.cumsum(lengths[order]) - lengths[order]
        batch = rig.batch(offsets, lengths, places=places)
        assert (run(start(max_io=max_io), batch) == lengths).all()
        for i in range(len(batch)):
            assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()

    def test_one_ioctx_may_be_larger_than_max_io(self, rig: Rig, start: Start) -> None:
        engine = start(max_io=64 << 10)
        batch = rig.batch([100, SEGMENT], [SEGMENT - 100, SEGMENT])
        assert run(engine, batch).tolist() == [SEGMENT - 100, SEGMENT]
        rig.memory[: SEGMENT - 100] ^= 255
        batch["operation"] = Operation.WRITE
        assert run(engine, batch).tolist() == [SEGMENT - 100, SEGMENT]
        assert (rig.on_disk(batch, 0) == rig.expected(batch, 0) ^ 255).all()
        assert (rig.on_disk(batch, 1) == rig.expected(batch, 1)).all()

    def test_no_byte_beyond_an_ioctx_is_touched(self, rig: Rig, start: Start) -> None:
        engine = start()
        region = GuardedRegion(64 << 10)
        for length in (1, 511, 4095, 4096, 4097, 8191, 64 << 10):
            region.view[:] = 0
            batch = rig.batch([SEGMENT - length], length)
            batch["address"] = region.address + region.size - length
            assert run(engine, batch).tolist() == [length]
            assert (region.tail(length) == rig.content[0, SEGMENT - length : SEGMENT]).all()
            assert not region.view[: region.size - length].any()
        region.close()

    def test_an_empty_batch_is_done(self, start: Start) -> None:
        engine = start()
        assert engine.wait(engine.submit(np.empty(0, IOCTX_DTYPE), IoClass.DEMAND, later()), 0).shape == (0,)

    def test_the_batch_is_the_callers_again_after_submit(self, rig: Rig, start: Start) -> None:
        engine = start()
        drives, offsets = rig.blocks(np.random.default_rng(5), 200)
        batch = rig.batch(offsets, drives=drives)
        ticket = engine.submit(batch, IoClass.DEMAND, later())
        kept = batch.copy()
        batch[:] = 0
        assert (engine.wait(ticket, PATIENCE) == BLOCK).all()
        assert all((rig.in_memory(kept, i) == rig.expected(kept, i)).all() for i in range(len(kept)))

    def test_a_hundred_thousand_ioctx_in_one_batch(self, rig: Rig, start: Start) -> None:
        engine = start(max_io=1 << 20)
        rng = np.random.default_rng(6)
        blocks = rng.integers(rig.segments * SEGMENT // BLOCK, size=100_000)
        blocks[:50_000] = np.tile(np.arange(rig.segments * SEGMENT // BLOCK), 98)[:50_000]
        offsets = blocks * BLOCK
        batch = rig.batch(offsets, drives=np.arange(100_000) % 2 * (np.arange(100_000) >= 50_000), places=offsets)
        batch["address"] += np.uint64(SEGMENT * rig.segments) * batch["drive"]  # equal bytes go to equal places
        assert (run(engine, batch) == BLOCK).all()
        both = rig.memory[: 2 * rig.segments * SEGMENT].reshape(2, -1)
        assert (both[0] == rig.content[0]).all()
        read = np.unique(offsets[batch["drive"] == 1] // BLOCK)
        assert (both[1].reshape(-1, BLOCK)[read] == rig.content[1].reshape(-1, BLOCK)[read]).all()

    def test_many_threads_share_an_engine(self, rig: Rig, start: Start) -> None:
        engine = start()
        wrong: list[str] = []

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            for _ in range(15):
                drives, offsets = rig.blocks(rng, 60)
                batch = rig.batch(offsets, drives=drives)
                batch["address"] += np.uint64(number * 60 * BLOCK)
                rig.memory[number * 60 * BLOCK :][: 60 * BLOCK] = 0
                results = run(engine, batch, IoClass(number % 3))
                same = all((rig.in_memory(batch, i) == rig.expected(batch, i)).all() for i in range(60))
                if not (results == BLOCK).all() or not same:
                    wrong.append(f"thread {number}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []

    def test_several_threads_may_wait_for_one_ticket(self, rig: Rig, start: Start) -> None:
        engine = start()
        drives, offsets = rig.blocks(np.random.default_rng(7), 300)
        ticket = engine.submit(rig.batch(offsets, drives=drives), IoClass.DEMAND, later())
        served: list[bool] = []
        threads = [
            threading.Thread(target=lambda: served.append(bool((engine.wait(ticket, PATIENCE) == BLOCK).all())))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert served == [True] * 4
        assert (engine.wait(ticket, 0) == BLOCK).all()

    def test_errors_belong_to_their_ioctx_alone(self, rig: Rig, start: Start) -> None:
        engine = start()
        os.ftruncate(rig.fds[1][1], SEGMENT // 2)
        readonly = os.open(rig.paths[0][1], os.O_RDONLY)
        assert engine.detach(0, 1)
        engine.attach(0, 1, readonly)
        half = SEGMENT + SEGMENT // 2
        cases = [  # drive, offset, length, operation, result
            (0, 0, BLOCK, 0, BLOCK),
            (0, BLOCK, 0, 0, -errno.EINVAL),
            (0, BLOCK, BLOCK, 0, BLOCK),
            (0, SEGMENT - 10, 20, 0, -errno.EINVAL),
            (0, BLOCK, BLOCK, 2, -errno.EINVAL),
            (0, 2 * BLOCK, BLOCK, 0, BLOCK),
            (0, SEGMENT, BLOCK, 1, -errno.EBADF),
            (0, SEGMENT, BLOCK, 0, BLOCK),
            (0, 2 * SEGMENT, BLOCK, 0, -errno.EBADF),
            (9, 0, BLOCK, 0, -errno.EBADF),
            (1, half - BLOCK, BLOCK, 0, BLOCK),
            (1, half, BLOCK, 0, -errno.EIO),
            (1, half - 100, 200, 0, -errno.EIO),
            (1, half - 3 * BLOCK, BLOCK, 1, BLOCK),
        ]
        drives, offsets, lengths, operations, wanted = map(list, zip(*cases, strict=True))
        batch = rig.batch(offsets, lengths, operations, drives=drives, places=np.arange(len(cases)) * 2 * BLOCK)
        rig.memory[26 * BLOCK : 27 * BLOCK] = 1
        assert run(engine, batch).tolist() == wanted
        for i in (0, 2, 5, 7, 10):
            assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()
        assert engine.detach(0, 1)
        os.close(readonly)
        engine.attach(0, 1, rig.fds[0][1])

    def test_a_full_disk_is_told_and_neighbours_are_served(self, rig: Rig, start: Start) -> None:
        engine = start()
        full = os.open("/dev/full", os.O_RDWR)
        engine.attach(5, 0, full)
        batch = rig.batch(np.arange(6) * BLOCK, operation=Operation.WRITE, drives=[0, 5, 5, 5, 0, 1])
        results = run(engine, batch, IoClass.WRITE)
        assert results.tolist() == [BLOCK, *[-errno.ENOSPC] * 3, BLOCK, BLOCK]
        assert engine.detach(5, 0)
        os.close(full)

    def test_a_file_that_may_not_grow_is_told_after_a_short_write(self, rig: Rig, start: Start) -> None:
        engine = start(max_io=1 << 20)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        batch = rig.batch(np.arange(8) * BLOCK, operation=Operation.WRITE)
        rig.memory[:] = 3
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK + 100, hard))  # Python ignores SIGXFSZ
            results = run(engine, batch, IoClass.WRITE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert results.tolist() == [*[BLOCK] * 4, *[-errno.EFBIG] * 4]
        assert all((rig.on_disk(batch, i) == 3).all() for i in range(4))
        assert (rig.on_disk(batch, 5) == rig.expected(batch, 5)).all()
