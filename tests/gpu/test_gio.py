"""The kernels on a GPU against the software controller, rings and data in pinned host memory.

From the source tree, with numpy, cuda-python, libcu++ and a C++ compiler; without SGLang, a store or an installation.
"""

import ctypes
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import Faults, Service, SoftwareController
from tutti_sglang.gio.rings import Budget
from tutti_sglang.kernels import gdrcopy, gio_native
from tutti_sglang.testing.gio_rig import SHAPES, GioRig, Shape

pytestmark = pytest.mark.gpu
AWAKE = Service(workers=4, spin_seconds=0.01, idle_seconds=0.001)
STATE_WORDS = ("in_use", "stray", "late", "sq_lock", "cq_lock")

Start = Callable[..., tuple[GioRig, Any]]


@pytest.fixture(scope="module")
def device() -> Any:
    try:
        from tutti_sglang.gio import gpu
    except ImportError as error:
        pytest.skip(f"cuda-python is missing or too old: {error}")
    try:
        device = gpu.Device()
        device.set_current()
    except Exception as error:
        pytest.skip(f"no CUDA device: {error}")
    return device


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if gio_native.compiler() is None:
        pytest.skip("no C++ compiler: the software controller cannot be built")
    return gio_native.current(tmp_path_factory.mktemp("gio"))


@pytest.fixture
def start(device: Any, native: ctypes.CDLL, tmp_path: Path) -> Iterator[Start]:
    """Makes rigs whose mover is the GPU; afterwards nothing may be left in its memory."""
    from tutti_sglang.gio.gpu import CudaMemory, GpuMover

    made: list[tuple[GioRig, GpuMover, CudaMemory]] = []

    def start(shape: Shape = SHAPES["SGL"], *, hbm_iocbs: bool = False) -> tuple[GioRig, GpuMover]:
        memory = CudaMemory(device, hbm_iocbs)
        folder = tmp_path / str(len(made))
        folder.mkdir()
        rig = GioRig(folder, native, memory, shape, AWAKE)
        mover = GpuMover(rig.ring, device, lambda: rig.controller.wake())
        made.append((rig, mover, memory))
        return rig, mover

    yield start
    for rig, mover, memory in made:
        mover.sync()
        size = len(rig.pairs.table) * abi.STATE_DTYPE.itemsize
        states = memory.read(int(rig.pairs.table["state"][0]), size).view(abi.STATE_DTYPE)
        for word in STATE_WORDS:
            assert not states[word].any(), word
        rig.close()
        mover.close()
        memory.close()


def test_the_kernels_load(start: Start) -> None:
    from tutti_sglang.kernels import gio_uring

    _, mover = start()
    for kernel in (mover._kernel, mover._reap, mover._abort):
        assert kernel.attributes.local_size_bytes == 0
    print(gio_uring.compile_kernels(mover.architecture).usage)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_at_their_place(start: Start, name: str, seed: int) -> None:
    shape = SHAPES[name]
    rig, _ = start(shape)
    rng = np.random.default_rng(seed)
    read = rig.random_batch(rng, alignment=4 if shape.sgl else 512)
    assert rig.run(read).tolist() == read["length"].tolist()
    for i in range(len(read)):
        assert (rig.in_memory(read, i) == rig.expected(read, i)).all()
    rig.region.view[:] = rng.integers(256, size=shape.memory, dtype=np.uint8)
    write = rig.random_batch(rng, alignment=4096, operation=1)
    wanted = rig.content.copy()
    for i in range(len(write)):
        wanted[int(write["offset"][i]) :][: int(write["length"][i])] = rig.in_memory(write, i)
    assert rig.run(write).tolist() == write["length"].tolist()
    assert (rig.on_disk() == wanted).all()


@pytest.mark.parametrize("name", ["SGL", "PRP", "blocks of 4 KiB"])
def test_neighbours_on_the_drive_are_one_command(start: Start, name: str) -> None:
    """Scattered in memory by SGL; side by side there by PRP too."""
    rig, mover = start(SHAPES[name])
    scattered = np.random.default_rng(0).permutation(64) * 8192
    for places in (np.arange(64) * 4096, scattered):
        rig.region.view[:] = 0
        mover.sync()
        before = rig.controller.counts()["commands"]
        batch = rig.batch(np.arange(64) * 4096, 4096, places=places)
        assert (rig.run(batch, joined=True) == 4096).all()
        for i in range(64):
            assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()
        one_each = name == "PRP" and places is scattered
        assert rig.controller.counts()["commands"] - before == (64 if one_each else 4)


def test_what_must_not_reach_the_drive_does_not(start: Start) -> None:
    rig, _ = start(SHAPES["an LBA range"])
    before = rig.controller.counts()["commands"]
    batch = rig.batch([256, 0, 2 * rig.shape.segment, 0], [512, 700, 4096, 4096])
    batch["drive"][3] = 1
    assert rig.run(batch).tolist() == [-errno.EINVAL, -errno.EINVAL, -errno.EBADF, -errno.EBADF]
    outside = rig.batch([0], 8192)
    outside["address"] = rig.region.address - 4096
    assert rig.run(outside).tolist() == [-errno.EFAULT]
    assert rig.controller.counts()["commands"] == before


def test_an_error_is_told_with_its_nvme_status(start: Start) -> None:
    rig, _ = start()
    rig.controller.set_faults(Faults(fail=1.0, status=abi.Status.CAPACITY_EXCEEDED, reads=False))
    ids = rig.issue(rig.batch([0, 4096, 8192], 4096, [0, 1, 0]))
    assert rig.ring.wait_cqe(ids, 60).all()
    assert rig.ring.results(int(ids[0])).tolist() == [4096, -errno.ENOSPC, 4096]
    assert rig.ring.status(int(ids[0])).tolist() == [0, abi.Status.CAPACITY_EXCEEDED, 0]
    rig.ring.release(ids)


def test_a_lost_command_ends_its_kernel_and_is_reaped_late(start: Start) -> None:
    rig, mover = start(Shape(pairs=1))
    rig.controller.set_faults(Faults(drop=1.0, writes=False))
    batch = rig.batch([0, 4096], 4096, [0, 1], places=[0, 8192])
    ids = rig.issue(batch, Budget(poll_ns=20_000_000))
    mover.sync()
    assert not rig.ring.wait_cqe(ids, 0.05).any()
    assert rig.ring.results(int(ids[0])).tolist() == [-errno.EINPROGRESS, 4096]
    assert rig.controller.release_dropped() == 1
    assert rig.ring.wait_cqe(ids, 60).all()
    assert rig.ring.results(int(ids[0])).tolist() == [4096, 4096]
    assert (rig.in_memory(batch, 0) == rig.expected(batch, 0)).all()
    rig.ring.release(ids)


def test_with_every_slot_lost_a_sub_io_gives_up_in_time(start: Start) -> None:
    rig, mover = start(Shape(pairs=1, log_entries=1))
    rig.controller.set_faults(Faults(drop=1.0))
    lost = rig.issue(rig.batch([0]), Budget(poll_ns=1_000_000))
    mover.sync()
    late = rig.issue(rig.batch([4096], places=[8192]), Budget(claim_ns=1_000_000))
    assert rig.ring.wait_cqe(late, 60).all()
    assert rig.ring.results(int(late[0])).tolist() == [-errno.ETIMEDOUT]
    rig.ring.release(late)
    rig.controller.release_dropped()
    assert rig.ring.wait_cqe(lost, 60).all()
    rig.ring.release(lost)


def test_a_reset_ends_every_command(start: Start) -> None:
    rig, mover = start(Shape(pairs=1))
    rig.controller.set_faults(Faults(drop=0.5, seed=1))
    ids = rig.issue(rig.batch(np.arange(20) * 4096), Budget(poll_ns=50_000_000))
    mover.sync()
    assert rig.controller.close(60)
    mover.abort(0)
    assert rig.ring.complete(ids).all()
    assert set(rig.ring.results(int(ids[0])).tolist()) == {4096, -errno.EIO}
    rig.ring.release(ids)
    rig.pairs.doorbells.view[:] = 0
    rig.controller = SoftwareController(rig.native, rig.limits, rig.pairs, rig.shape.segment, AWAKE)
    for i in range(len(rig.regions)):
        rig.controller.map(rig.regions[i : i + 1])
    rig.controller.attach(0, rig.fds[0])
    rig.controller.start()
    assert rig.run(rig.batch(np.arange(20) * 4096)).tolist() == [4096] * 20


@pytest.mark.parametrize("sms", [1, 8, 16])
def test_the_kernel_runs_on_the_sms_it_is_given(start: Start, device: Any, sms: int) -> None:
    rig, mover = start(Shape(log_entries=7))
    stream, granted = mover.stream(sms)
    assert sms <= granted < device.resources.sm.sm_count
    assert stream.resources.sm.sm_count == granted
    batch = rig.batch(np.arange(abi.CONTEXTS) * 512, 512)
    assert (rig.run(batch, sms=sms) == 512).all()
    assert (rig.region.view[: abi.CONTEXTS * 512] == rig.content[: abi.CONTEXTS * 512]).all()


def test_bytes_move_after_the_event(start: Start, device: Any) -> None:
    """A write that waits for an event writes what the GPU made before it."""
    from cuda.bindings import driver

    rig, _ = start()
    stream = device.create_stream()
    for value in range(1, 20):
        size = 1 << 20
        for fill in (0, value):  # long enough to be still at it when the kernel is launched
            driver.cuMemsetD8Async(rig.region.address, fill, size, stream.handle)
        ids = rig.ring.get_iocb(1, stream.record())
        assert ids is not None
        rig.ring.fill(int(ids[0]), rig.batch([0], size, 1))
        rig.ring.issue_io(ids, 8)
        assert rig.ring.wait_cqe(ids, 60).all()
        rig.ring.release(ids)
        assert (rig.on_disk()[:size] == value).all()


def test_iocbs_may_lie_in_hbm(start: Start) -> None:
    if reason := gdrcopy.unavailable_reason():
        pytest.skip(f"no GDRCopy: {reason}")
    rig, _ = start(hbm_iocbs=True)
    batch = rig.random_batch(np.random.default_rng(0), alignment=4)
    assert rig.run(batch).tolist() == batch["length"].tolist()
    for i in range(len(batch)):
        assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()


@pytest.mark.parametrize("log_entries", [2, 6])
def test_many_sub_ios_with_errors_losses_and_delays(start: Start, log_entries: int) -> None:
    rig, mover = start(Shape(pairs=4, log_entries=log_entries, mdts=1024))
    rig.controller.set_faults(Faults(seed=1, fail=0.01, drop=0.001, delay=0.05, delay_seconds=0.002, writes=False))
    rng = np.random.default_rng(log_entries)
    for _ in range(20):
        rig.region.view[:] = 0
        blocks = rng.permutation(2 * rig.shape.segment // 2048)[:1000]
        batch = rig.batch(blocks * 2048, 2048)
        ids = rig.issue(batch, Budget(poll_ns=20_000_000), sms=8)
        while not rig.ring.wait_cqe(ids, 0.1).all():
            rig.controller.release_dropped()
        results = np.concatenate([rig.ring.results(iocb) for iocb in ids.tolist()])
        assert set(results.tolist()) <= {2048, -errno.EIO}
        for i in np.flatnonzero(results > 0).tolist():
            assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()
        rig.ring.release(ids)
    mover.sync()
    rig.controller.release_dropped()
