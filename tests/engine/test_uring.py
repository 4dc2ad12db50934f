"""The native engine passes the suite, over io_uring and with its threads, and falls from one to the other by itself."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tutti_sglang.engine import IoClass
from tutti_sglang.engine.uring import UringEngine, uring_refused
from tutti_sglang.kernels import native
from tutti_sglang.memory import Region
from tutti_sglang.testing.engine_case import PATIENCE, later, run
from tutti_sglang.testing.engine_suite import EngineSuite
from tutti_sglang.testing.faults import EVERY_BLOCK, Fault, FaultPlan
from tutti_sglang.testing.rig import BLOCK, SEGMENT, Rig

ROOT = Path(__file__).parents[2]

if native.library() is None:
    pytest.skip(native.unavailable_reason(), allow_module_level=True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


needs_uring = pytest.mark.skipif(bool(uring_refused()), reason=uring_refused())


class NativeSuite(EngineSuite):
    pool = False

    def create(self, memory: Region, *, depth: int, max_io: int, plan: FaultPlan | None = None) -> UringEngine:
        faults = plan.packed() if plan else None
        return UringEngine(SEGMENT, queue_depth=depth, max_io=max_io, staging=memory, faults=faults, pool=self.pool)

    def test_neighbours_are_one_transfer_up_to_max_io(self, rig: Rig, start) -> None:
        engine = start(max_io=16 * BLOCK)
        assert (run(engine, rig.batch(np.arange(40) * BLOCK)) == BLOCK).all()
        assert engine.counters._replace(resumed=0) == (40, 3, 40 * BLOCK, 0, 0)

    def test_descriptors_and_threads_are_flat_over_a_thousand_rounds(self, rig: Rig) -> None:
        """A closed engine that something still refers to, as a cycle does until the next collection, keeps nothing."""
        held = lambda: [len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")]  # noqa: E731
        before, kept = held(), []
        for turn in range(1000):
            engine = self.create(rig.region, depth=2, max_io=BLOCK)
            rig.attach(engine)
            if turn % 100 == 0:
                assert (run(engine, rig.batch([0])) == BLOCK).all()
            assert engine.close(PATIENCE)
            kept.append(engine)
            until(lambda: held() == before)  # a thread that was joined is listed for a moment longer

    def test_a_large_ioctx_is_cut_to_max_io_and_its_pieces_move_at_once(self, rig: Rig, start) -> None:
        plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, end=16 * BLOCK)
        engine = start(max_io=16 * BLOCK, plan=plan)
        ticket = engine.submit(rig.batch([0], 40 * BLOCK), IoClass.DEMAND, later())
        until(lambda: engine.counters.transfers == 3)
        plan.gate.open()
        assert engine.wait(ticket, PATIENCE).tolist() == [40 * BLOCK]
        assert engine.counters.transfers == 3

    def test_what_waits_starts_by_class_and_no_class_starves(self, rig: Rig, start) -> None:
        engine = start(depth=1, max_io=BLOCK, plan=FaultPlan({Fault.LATE: EVERY_BLOCK}, delay=0.0005))
        offsets = np.arange(100) * 2 * BLOCK
        tickets = {klass: engine.submit(rig.batch(offsets), klass, later()) for klass in reversed(IoClass)}

        def done() -> dict[IoClass, int]:
            return {klass: int((engine.wait(ticket, 0) == BLOCK).sum()) for klass, ticket in tickets.items()}

        while (seen := done())[IoClass.DEMAND] < 100:
            time.sleep(0.001)
            assert seen[IoClass.WRITE] + seen[IoClass.PRELOAD] <= seen[IoClass.DEMAND] / 8 + 2, seen
        assert seen[IoClass.WRITE] > 0
        assert seen[IoClass.PRELOAD] > 0
        for ticket in tickets.values():
            assert (engine.wait(ticket, PATIENCE) == BLOCK).all()


@needs_uring
class TestUring(NativeSuite):
    def test_the_first_of_staging_is_registered_without_any_io(self, rig: Rig, start) -> None:
        engine = start()
        assert engine.name == "uring"
        until(lambda: engine.registered == rig.region.size)
        assert engine.counters.transfers == 0
        assert run(engine, rig.batch([0])).tolist() == [BLOCK]
        assert engine.registered == rig.region.size


class TestPool(NativeSuite):
    pool = True

    def test_it_says_that_it_is_not_io_uring(self, start) -> None:
        assert start().name == "pool"
        assert "left aside" in start().refused


def in_a_child(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


REFUSED = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
BPF_LD_W_ABS, BPF_JEQ, BPF_RET, ALLOW, ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
IO_URING_SETUP = 425
error = ERRNO | int(sys.argv[2])
steps = (BPF_LD_W_ABS, 0, 0, 0), (BPF_JEQ, 0, 1, IO_URING_SETUP), (BPF_RET, 0, 0, error), (BPF_RET, 0, 0, ALLOW)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
def limit():
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, program, 0, 0) == 0  # seccomp
"""

LIMITED = """
import os, resource
def limit():
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    if os.geteuid() == 0:
        os.seteuid(65534)  # without CAP_IPC_LOCK
"""

MOVE = """
import sys
from pathlib import Path
from tutti_sglang.engine.uring import UringEngine
from tutti_sglang.testing.engine_case import run
from tutti_sglang.testing.rig import SEGMENT, Rig
rig = Rig(Path(sys.argv[1]))
limit()
engine = UringEngine(SEGMENT, staging=rig.region)
rig.attach(engine)
batch = rig.batch([0, SEGMENT], SEGMENT, drives=[0, 1])
assert run(engine, batch).tolist() == [SEGMENT, SEGMENT]
assert all((rig.in_memory(batch, i) == rig.expected(batch, i)).all() for i in range(2))
print(engine.name, engine.registered, engine.refused)
assert engine.close(10)
"""


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_where_a_seccomp_filter_refuses_io_uring_threads_take_over_and_say_so(tmp_path: Path, error: int) -> None:
    name, _, reason = in_a_child(REFUSED + MOVE, tmp_path, error).split(maxsplit=2)
    assert name == "pool"
    assert "seccomp" in reason
    assert errno.errorcode[error] in reason


@needs_uring
def test_where_locked_memory_is_scarce_nothing_is_registered_and_all_works(tmp_path: Path) -> None:
    assert in_a_child(LIMITED + MOVE, tmp_path).split() == ["uring", "0"]


THREADLESS = """
import os, resource
def limit():
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if os.getuid() == 0:
        os.setuid(65534)  # root is exempt
"""


def test_where_there_is_no_thread_to_be_had_attach_is_an_error_and_the_process_lives(tmp_path: Path) -> None:
    guarded = "try:\n    rig.attach(engine)\nexcept Exception as error:\n    sys.exit(print(error))"
    attempt = MOVE.replace("rig.attach(engine)", guarded)
    assert "no thread" in in_a_child(THREADLESS + attempt, tmp_path)
