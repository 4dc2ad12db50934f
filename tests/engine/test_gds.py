"""The engine over cuFile passes the suite, with host memory in the place of the device's, and says what cuFile said."""

import errno
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings.cufile", reason="cuda-python is not installed")

from tests.engine.cufile import Refused, stand_in
from tutti_sglang.engine import Engine, Operation
from tutti_sglang.engine.gds import GdsEngine, plan_pieces, range_of
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import gds
from tutti_sglang.memory import PAGE, Region
from tutti_sglang.testing.engine_case import PATIENCE, run
from tutti_sglang.testing.engine_suite import EngineSuite
from tutti_sglang.testing.faults import FaultPlan, FaultySystem
from tutti_sglang.testing.rig import BLOCK, SEGMENT, Rig


class TestGdsEngine(EngineSuite):
    def create(self, memory: Region, *, depth: int, max_io: int, plan: FaultPlan | None = None) -> Engine:
        _, cufile = stand_in()
        engine = GdsEngine(SEGMENT, depth, max_io, cufile)
        engine.register(memory.address, memory.size)
        if plan:
            engine._seam = FaultySystem(plan, engine._seam)
        return engine


RANGES = np.array([[0x10000, 0x20000], [0x20000, 0x28000], [0x40000, 0x50000]], dtype=np.uint64)
places = st.tuples(st.integers(0, 0x60), st.integers(1, 0x40)).map(lambda each: (each[0] << 12, each[1] << 8))


@given(st.lists(places, min_size=1, max_size=30))
def test_every_byte_is_planned_once_in_order_and_inside_its_registered_memory(pieces: list[tuple[int, int]]) -> None:
    iovecs = np.array(pieces, dtype=np.uint64)
    count, planned = plan_pieces(RANGES, iovecs)
    where = range_of(RANGES, iovecs[:, 0], iovecs[:, 1])
    assert 1 <= count <= len(iovecs)
    assert len(set((where[:count] < 0).tolist())) == 1, "one kind of memory"
    assert count == len(iovecs) or (where[count] < 0) != (where[0] < 0)
    ends = dict(RANGES.tolist())
    if where[0] < 0:
        assert planned == []
        return
    assert all(each.place + each.size <= ends[each.base] - each.base for each in planned)
    byte = [address + at for address, size in pieces[:count] for at in range(0, size, 256)]
    assert [each.base + each.place + at for each in planned for at in range(0, each.size, 256)] == byte
    for one, other in pairwise(planned):
        assert one.base != other.base or one.place + one.size != other.place, "neighbours are one call"


def test_where_nothing_is_registered_all_memory_is_the_hosts() -> None:
    iovecs = np.array([(4096, 512), (8192, 512)], dtype=np.uint64)
    assert plan_pieces(np.empty((0, 2), np.uint64), iovecs) == (2, [])


@pytest.mark.parametrize(
    ("status", "number"),
    [(13, errno.EACCES), (5022, errno.EINVAL), (5012, errno.EFAULT), (5008, errno.EOPNOTSUPP), (5030, errno.EIO)],
)
def test_what_cufile_says_is_an_errno(status: int, number: int) -> None:
    assert gds.errno_of(Refused(status)) == number


def test_every_error_of_cufile_has_one() -> None:
    from cuda.bindings import cufile

    codes = [int(each) for each in cufile.OpError if int(each)]
    assert codes
    assert all(gds.errno_of(cufile.cuFileError(code)) in errno.errorcode for code in codes)
    assert gds.errno_of(RuntimeError("a library that is missing")) == errno.EIO


def test_device_and_host_memory_in_one_batch_each_go_their_way(tmp_path: Path) -> None:
    library, cufile = stand_in()
    rig, engine = Rig(tmp_path), GdsEngine(SEGMENT, 2, 256 << 10, cufile)
    engine.register(rig.region.address, 4 * BLOCK)
    rig.attach(engine)
    batch = rig.batch([BLOCK * n for n in range(8)])  # one transfer: neighbours on the drive
    assert run(engine, batch).tolist() == [BLOCK] * 8
    assert all((rig.in_memory(batch, i) == rig.expected(batch, i)).all() for i in range(8))
    assert library.calls == [(0, 0, 4 * BLOCK)], "one call for what lies side by side"
    assert engine.close(PATIENCE)
    assert not library.open
    rig.close()


def test_what_is_reached_is_whole_blocks_of_registered_memory() -> None:
    _, cufile = stand_in()
    region, engine = Region(16 * PAGE), GdsEngine(SEGMENT, 1, 1 << 20, cufile)
    engine.register(region.address, 8 * PAGE)
    rows = np.uint64(region.address) + np.array([[0, PAGE], [2 * PAGE, 6 * PAGE]], dtype=np.uint64)
    assert engine.reaches(rows, np.array([PAGE, 2 * PAGE]))
    assert not engine.reaches(rows, np.array([PAGE, 3 * PAGE])), "the last one ends outside"
    assert not engine.reaches(rows + np.uint64(512), np.array([PAGE, PAGE]))
    assert not engine.reaches(rows, np.array([PAGE, 512]))
    assert engine.close(PATIENCE)


def test_what_cufile_refuses_fails_alone_and_by_its_errno(tmp_path: Path) -> None:
    library, cufile = stand_in()
    rig, engine = Rig(tmp_path), GdsEngine(SEGMENT, 2, BLOCK, cufile)
    engine.register(rig.region.address, 4 * BLOCK)
    rig.attach(engine)
    library.refuses = 5036
    batch = rig.batch([0, BLOCK], places=[0, 6 * BLOCK])
    assert run(engine, batch).tolist() == [-errno.EFAULT, BLOCK], "host memory does not go by cuFile"
    library.refuses = 0
    write = rig.batch([0], operation=Operation.WRITE)
    assert run(engine, write).tolist() == [BLOCK]
    assert (rig.on_disk(write, 0) == rig.in_memory(write, 0)).all()
    assert engine.close(PATIENCE)
    rig.close()


def test_a_file_that_cufile_does_not_take_serves_the_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library, cufile = stand_in()
    rig, engine = Rig(tmp_path), GdsEngine(SEGMENT, 2, BLOCK, cufile)
    engine.register(rig.region.address, 4 * BLOCK)
    library.refuses = 5018
    rig.attach(engine)
    library.refuses = 0
    assert "does not take a segment file" in caplog.text
    assert run(engine, rig.batch([0, BLOCK], places=[0, 6 * BLOCK])).tolist() == [-errno.EBADF, BLOCK]
    assert engine.close(PATIENCE)
    rig.close()


def test_where_cufile_does_not_start_the_engine_says_so() -> None:
    library, _ = stand_in()
    library.refuses = 5033
    with pytest.raises(EngineError, match=r"5033.*nvidia-fs"):
        gds.CuFile(library, type("Driver", (), {"cuCtxGetCurrent": lambda self: (0, 7)})())
