"""cuFile between a file and device memory, in whatever mode this machine has: nvidia-fs, P2PDMA or compat."""

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tutti_sglang import checksum
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import gds, streams
from tutti_sglang.kernels.pack import Paged

pytestmark = pytest.mark.gpu
BLOCK, BLOCKS = 4096, 64


class World:
    """A file of known bytes and as much registered device memory."""

    def __init__(self, cufile: gds.CuFile, folder: Path) -> None:
        self.cufile = cufile
        self.content = np.random.default_rng(1).integers(256, size=BLOCKS * BLOCK, dtype=np.uint8)
        self.path = folder / "file"
        self.path.write_bytes(self.content.tobytes())
        self.fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        self.memory = torch.zeros(BLOCKS * BLOCK, dtype=torch.uint8, device="cuda")
        cufile.register_memory(self.memory.data_ptr(), self.memory.numel())
        self.handle = cufile.register_file(self.fd)

    def move(self, write: bool, blocks: int, offset: int, place: int) -> int:
        return self.cufile.move(write, self.handle, self.memory.data_ptr(), blocks * BLOCK, offset, place)

    def close(self) -> None:
        self.cufile.forget_file(self.handle)
        self.cufile.forget_memory(self.memory.data_ptr())
        self.cufile.close()
        os.close(self.fd)


@pytest.fixture
def world() -> Iterator[World]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.zeros(1, device="cuda")
    found = gds.probe()
    if found.mode is gds.Mode.NONE:
        pytest.skip(found.reason)
    print(f"GPUDirect Storage: {found.mode} {found.reason}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # tmpfs knows no O_DIRECT
        try:
            made = World(gds.CuFile(), Path(folder))
        except EngineError as error:
            pytest.skip(str(error))
        yield made
        made.close()


def test_blocks_come_to_their_places_and_nowhere_else(world: World) -> None:
    assert world.move(False, 3, 8 * BLOCK, 2 * BLOCK) == 3 * BLOCK
    now = world.memory.cpu().numpy()
    assert (now[2 * BLOCK : 5 * BLOCK] == world.content[8 * BLOCK : 11 * BLOCK]).all()
    assert not now[: 2 * BLOCK].any()
    assert not now[5 * BLOCK :].any()


def test_what_is_written_is_in_the_file(world: World) -> None:
    world.memory[:] = torch.from_numpy(world.content[::-1].copy()).cuda()
    torch.cuda.synchronize()
    assert world.move(True, BLOCKS, 0, 0) == BLOCKS * BLOCK
    os.fsync(world.fd)
    assert world.path.read_bytes() == world.content[::-1].tobytes()


def test_threads_without_a_context_of_their_own_move_too(world: World) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda at=at: got.append(world.move(False, 8, at * BLOCK, at * BLOCK)))
        for at in range(0, BLOCKS, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [8 * BLOCK] * len(threads)
    assert (world.memory.cpu().numpy() == world.content).all()


def test_what_cufile_brought_is_scattered_and_summed_on_the_device(world: World) -> None:
    """A piece of a layer as the direct path moves it: a drive's blocks, K and V of three pages, to their slots."""
    size, pages = 2 * BLOCK, [9, 2, 5]
    pools = [torch.zeros(16, size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    numbers = torch.tensor(pages, device="cuda")
    stream = streams.PoolStream(world.memory.device)
    pack = stream.pack([Paged(each.data_ptr(), size, 1, 0, 1, 0, size) for each in pools])
    assert world.move(False, 12, 8 * BLOCK, 0) == 12 * BLOCK
    stream.follow()
    places = np.arange(6, dtype=np.uint64).reshape(3, 2) * np.uint64(size)
    source = stream.upload(np.uint64(world.memory.data_ptr()) + places)
    blocks = stream.land(pack, numbers, slice(0, 2), source, sums=True)
    content = world.content[8 * BLOCK : 20 * BLOCK]
    for place, page in enumerate(pages):
        for tensor, pool in enumerate(pools):
            assert (pool[page].cpu().numpy() == content.reshape(3, 2, size)[place, tensor]).all()
    want = checksum.sums(np.uint64(content.ctypes.data) + places, [size, size])
    for tensor in range(2):
        assert (checksum.finish(np.ascontiguousarray(blocks[:, tensor]), size) == want[:, tensor]).all()


def test_an_error_is_an_errno_and_the_next_call_works(world: World) -> None:
    result = world.cufile.move(False, world.handle, world.memory.data_ptr(), BLOCK, 0, 2 * BLOCKS * BLOCK)
    assert -result in errno.errorcode, "memory that is not registered"
    assert world.move(False, 1, 0, 0) == BLOCK
