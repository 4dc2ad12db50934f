"""Engine suite: deadlines, cancel, detach, close, fork; nothing leaks, nothing waits for what does not come."""

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import IN_PROGRESS, IoClass, Operation
from tutti_sglang.errors import EngineError
from tutti_sglang.testing.engine_case import PATIENCE, EngineCase, Start, later, run, settle_behind
from tutti_sglang.testing.faults import EVERY_BLOCK, WRITES, Fault, FaultPlan
from tutti_sglang.testing.rig import BLOCK, SEGMENT, Rig

HEALTHY = 64 * BLOCK
"""The blocks of drive 0 before this one do not answer until the gate opens."""


def stalling() -> FaultPlan:
    """Drive 0 does not answer for the blocks before HEALTHY."""
    return FaultPlan({Fault.STALL: EVERY_BLOCK}, end=HEALTHY, drive=0)


def apart(count: int) -> np.ndarray:
    """(count,) offsets before HEALTHY that cannot be joined."""
    assert count <= 32
    return np.arange(count) * 2 * BLOCK


class EngineLimits(EngineCase):
    """Time and life."""

    def test_what_has_not_started_by_the_deadline_never_does(self, rig: Rig, start: Start) -> None:
        engine = start()
        drives, offsets = rig.blocks(np.random.default_rng(1), 50)
        ticket = engine.submit(rig.batch(offsets, drives=drives), IoClass.DEMAND, time.monotonic() - 1)
        assert (engine.wait(ticket, PATIENCE) == -errno.ETIMEDOUT).all()
        assert not rig.memory.any()

    def test_a_drive_that_answers_late_keeps_its_memory_until_then(self, rig: Rig, start: Start) -> None:
        plan = stalling()
        engine = start(plan=plan)
        batch = rig.batch([0])
        ticket = engine.submit(batch, IoClass.DEMAND, later())
        settle_behind(engine, rig, HEALTHY)
        assert engine.wait(ticket, 0).tolist() == [IN_PROGRESS]
        assert engine.wait(ticket, 0.05).tolist() == [IN_PROGRESS]
        assert not rig.in_memory(batch, 0).any()
        plan.gate.open()
        assert engine.wait(ticket, PATIENCE).tolist() == [BLOCK]
        assert (rig.in_memory(batch, 0) == rig.expected(batch, 0)).all()

    def test_the_deadline_holds_while_the_whole_drive_hangs(self, rig: Rig, start: Start) -> None:
        plan = stalling()
        engine = start(depth=2, plan=plan)
        ticket = engine.submit(rig.batch(apart(32)), IoClass.DEMAND, time.monotonic() + 0.3)
        results = engine.wait(ticket, PATIENCE / 100)
        assert set(results.tolist()) <= {IN_PROGRESS, -errno.ETIMEDOUT}
        assert (results == IN_PROGRESS).sum() <= 2
        plan.gate.open()
        ended = engine.wait(ticket, PATIENCE)
        assert (ended == np.where(results == IN_PROGRESS, BLOCK, results)).all()

    def test_a_hung_drive_does_not_hold_up_the_others(self, rig: Rig, start: Start) -> None:
        engine = start(depth=2, plan=stalling())
        hung = engine.submit(rig.batch(apart(8)), IoClass.DEMAND, later())
        other = rig.batch(np.arange(50) * BLOCK, drives=1, places=np.arange(50) * BLOCK + (1 << 20))
        assert (run(engine, other) == BLOCK).all()
        assert (engine.wait(hung, 0) == IN_PROGRESS).all()

    def test_cancel_ends_what_has_not_started(self, rig: Rig, start: Start) -> None:
        plan = stalling()
        engine = start(depth=2, plan=plan)
        started = engine.submit(rig.batch([63 * BLOCK]), IoClass.DEMAND, later())
        settle_behind(engine, rig, HEALTHY)
        queued = engine.submit(rig.batch(apart(30), places=(np.arange(30) + 1) * BLOCK), IoClass.DEMAND, later())
        for ticket in (started, queued, queued):
            engine.cancel(ticket)
        assert engine.wait(started, 0).tolist() == [IN_PROGRESS]
        results = engine.wait(queued, 0)
        assert set(results.tolist()) <= {IN_PROGRESS, -errno.ECANCELED}
        assert (results == IN_PROGRESS).sum() <= 1
        plan.gate.open()
        assert engine.wait(started, PATIENCE).tolist() == [BLOCK]
        assert (engine.wait(queued, PATIENCE) == np.where(results == IN_PROGRESS, BLOCK, results)).all()
        for i in np.flatnonzero(results == -errno.ECANCELED):
            assert not rig.memory[(i + 1) * BLOCK : (i + 2) * BLOCK].any()

    def test_cancelling_what_is_done_changes_nothing(self, rig: Rig, start: Start) -> None:
        engine = start()
        ticket = engine.submit(rig.batch([0, BLOCK]), IoClass.DEMAND, later())
        assert engine.wait(ticket, PATIENCE).tolist() == [BLOCK, BLOCK]
        engine.cancel(ticket)
        assert engine.wait(ticket, 0).tolist() == [BLOCK, BLOCK]

    def test_a_storm_of_slow_writes_leaves_room_for_a_demand_read(self, rig: Rig, start: Start) -> None:
        engine = start(depth=4, plan=FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES))
        writes = rig.batch(apart(32), operation=Operation.WRITE)
        storm = engine.submit(writes, IoClass.WRITE, later())
        settle_behind(engine, rig, HEALTHY)
        assert (engine.wait(storm, 0) == IN_PROGRESS).all()

    def test_an_io_that_hangs_leaves_room_for_the_others(self, rig: Rig, start: Start) -> None:
        engine = start(depth=4, plan=stalling())
        hung = engine.submit(rig.batch([0]), IoClass.DEMAND, later())
        drives, offsets = rig.blocks(np.random.default_rng(2), 900)
        healthy = (drives == 1) | (offsets >= HEALTHY)
        long = engine.submit(rig.batch(offsets[healthy], drives=drives[healthy]), IoClass.PRELOAD, later())
        settle_behind(engine, rig, HEALTHY)
        assert (engine.wait(long, PATIENCE) == BLOCK).all()
        assert engine.wait(hung, 0).tolist() == [IN_PROGRESS]

    def test_hold_lives_until_the_last_ioctx_is_done(self, rig: Rig, start: Start) -> None:
        class Memory:
            pass

        plan = stalling()
        engine = start(plan=plan)
        memory = Memory()
        seen = weakref.ref(memory)
        ticket = engine.submit(rig.batch([0, HEALTHY]), IoClass.DEMAND, later(), memory)
        del memory
        settle_behind(engine, rig, HEALTHY)
        assert seen() is not None
        plan.gate.open()
        assert (engine.wait(ticket, PATIENCE) == BLOCK).all()
        _until(lambda: seen() is None)

    def test_hold_is_released_without_a_wait_when_the_engine_is_used_again(self, rig: Rig, start: Start) -> None:
        class Memory:
            pass

        engine = start()
        memory = Memory()
        seen = weakref.ref(memory)
        engine.submit(rig.batch([0]), IoClass.DEMAND, later(), memory)
        del memory
        _until(lambda: (run(engine, rig.batch([0])) == BLOCK).all() and seen() is None)

    def test_detach_waits_for_what_is_in_flight(self, rig: Rig, start: Start) -> None:
        plan = stalling()
        engine = start(depth=2, plan=plan)
        started = engine.submit(rig.batch([63 * BLOCK]), IoClass.DEMAND, later())
        settle_behind(engine, rig, HEALTHY)
        queued = engine.submit(rig.batch(apart(30), places=(np.arange(30) + 1) * BLOCK), IoClass.DEMAND, later())
        other = engine.submit(rig.batch([SEGMENT], places=[40 * BLOCK]), IoClass.DEMAND, later())
        assert not engine.detach(0, 0, 0.05)
        assert not engine.detach(0, 0, 0)
        assert run(engine, rig.batch([HEALTHY])).tolist() == [-errno.EBADF]
        results = engine.wait(queued, 0)
        assert set(results.tolist()) <= {IN_PROGRESS, -errno.EBADF}
        assert (results == IN_PROGRESS).sum() <= 1
        plan.gate.open()
        assert engine.wait(started, PATIENCE).tolist() == [BLOCK]
        assert engine.wait(other, PATIENCE).tolist() == [BLOCK]
        assert (engine.wait(queued, PATIENCE) == np.where(results == IN_PROGRESS, BLOCK, results)).all()
        assert engine.detach(0, 0, PATIENCE)

    def test_a_detached_segment_can_get_another_file(self, rig: Rig, start: Start) -> None:
        engine = start()
        with pytest.raises(EngineError, match="has a file"):
            engine.attach(0, 0, rig.fds[1][1])
        assert engine.detach(0, 0)
        assert engine.detach(0, 0)
        engine.attach(0, 0, rig.fds[1][1])
        batch = rig.batch([0])
        assert run(engine, batch).tolist() == [BLOCK]
        assert (rig.in_memory(batch, 0) == rig.content[1, SEGMENT : SEGMENT + BLOCK]).all()

    def test_close_drains(self, rig: Rig, start: Start) -> None:
        engine = start(depth=2, max_io=BLOCK, plan=FaultPlan({Fault.LATE: EVERY_BLOCK}, delay=0.001))
        drives, offsets = rig.blocks(np.random.default_rng(3), 200)
        ticket = engine.submit(rig.batch(offsets, drives=drives), IoClass.WRITE, later())
        assert engine.close(PATIENCE)
        assert (engine.wait(ticket, 0) == BLOCK).all()
        assert engine.close(0)

    def test_close_cannot_wait_for_ever(self, rig: Rig, start: Start) -> None:
        plan = stalling()
        engine = start(depth=2, plan=plan)
        started = engine.submit(rig.batch([63 * BLOCK]), IoClass.DEMAND, later())
        settle_behind(engine, rig, HEALTHY)
        queued = engine.submit(rig.batch(apart(30), places=(np.arange(30) + 1) * BLOCK), IoClass.DEMAND, later())
        assert not engine.close(0.05)
        assert engine.wait(started, 0).tolist() == [IN_PROGRESS]
        results = engine.wait(queued, 0)
        assert set(results.tolist()) <= {IN_PROGRESS, -errno.ECANCELED}
        assert not engine.close(0)
        plan.gate.open()
        assert engine.wait(started, PATIENCE).tolist() == [BLOCK]
        assert engine.close(PATIENCE)

    def test_a_closed_engine_takes_nothing_more(self, rig: Rig, start: Start) -> None:
        engine = start()
        assert engine.close(PATIENCE)
        with pytest.raises(EngineError, match="closed"):
            engine.submit(rig.batch([0]), IoClass.DEMAND, later())
        with pytest.raises(EngineError, match="closed"):
            engine.attach(3, 3, rig.fds[0][0])
        assert engine.detach(0, 0)

    def test_close_beside_submitting_threads_loses_no_result(self, rig: Rig, start: Start) -> None:
        engine = start()
        odd: list[int] = []

        def work(number: int) -> None:
            while True:
                try:
                    batch = rig.batch(np.arange(20) * 2 * BLOCK, places=(np.arange(20) + 20 * number) * BLOCK)
                    results = run(engine, batch)
                except EngineError:
                    return
                odd.extend(set(results.tolist()) - {BLOCK, -errno.ECANCELED})

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        assert engine.close(PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert odd == []

    def test_a_forked_child_is_refused_and_the_parent_goes_on(self, rig: Rig, start: Start) -> None:
        engine = start()
        ticket = engine.submit(rig.batch([0]), IoClass.DEMAND, later())
        assert engine.wait(ticket, PATIENCE).tolist() == [BLOCK]
        batch = rig.batch([BLOCK])
        child = os.fork()
        if not child:
            refused = 0
            try:
                for call in (
                    lambda: engine.submit(batch, IoClass.DEMAND, later()),
                    lambda: engine.wait(ticket, 0),
                    lambda: engine.cancel(ticket),
                    lambda: engine.attach(4, 4, rig.fds[0][0]),
                    lambda: engine.detach(0, 0),
                ):
                    try:
                        call()
                    except EngineError:
                        refused += 1
                refused += engine.close(0.1)
            finally:
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
        assert run(engine, batch).tolist() == [BLOCK]

    def test_threads_and_descriptors_stay_flat_over_attach_and_detach(self, rig: Rig, start: Start) -> None:
        engine = start()

        def rounds(count: int) -> None:
            for _ in range(count):
                assert engine.detach(0, 0)
                engine.attach(0, 0, rig.fds[0][0])
                assert run(engine, rig.batch([0])).tolist() == [BLOCK]

        rounds(10)
        before = _resources()
        rounds(1000)
        assert _resources() == before

    def test_threads_and_descriptors_stay_flat_over_engines(self, rig: Rig) -> None:
        def rounds(count: int) -> None:
            for _ in range(count):
                engine: Engine = self.create(rig.region, depth=4, max_io=1 << 20)
                rig.attach(engine)
                assert run(engine, rig.batch([0])).tolist() == [BLOCK]
                assert engine.close(PATIENCE)

        rounds(3)
        before = _resources()
        rounds(60)
        _until(lambda: _resources() <= before)


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _until(condition: Callable[[], object]) -> None:
    """Threads end, and references die, a moment after what they served."""
    until = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    assert condition()
