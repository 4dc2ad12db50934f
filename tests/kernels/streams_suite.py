"""What `kernels/streams.py` promises on any device: run on the CPU by test_streams.py, on a GPU by tests/gpu.
Needs no more than torch and the source tree."""

import numpy as np
import torch

from tutti_sglang import checksum
from tutti_sglang.kernels import streams
from tutti_sglang.kernels.pack import Pack, Paged
from tutti_sglang.memory import Region

PAGES, LAYERS, PAGE, WIDTH = 32, 4, 16, 256
SIZE = PAGE * WIDTH
TENSORS = 2 * LAYERS


class World:
    """A pool of LAYERS layers with K and V, pages of SIZE bytes each, and registered host memory for `PAGES` pages."""

    def __init__(self, device: torch.device, make: type[Pack] | None = None) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(1)
        self.buffers = [
            torch.randint(0, 256, (PAGES, SIZE), dtype=torch.uint8, generator=generator).to(device)
            for _ in range(TENSORS)
        ]
        self.stream = streams.PoolStream(device, make)
        tensors = [Paged(each.data_ptr(), SIZE, 1, 0, 1, 0, SIZE) for each in self.buffers]
        self.pack = self.stream.pack(tensors)
        self.region = Region(PAGES * TENSORS * SIZE)
        streams.register(device, self.region.address, self.region.size)
        self.host = self.region.view.reshape(PAGES, TENSORS, SIZE)
        self.rows = np.uint64(self.region.address) + np.arange(PAGES * TENSORS, dtype=np.uint64).reshape(
            PAGES, TENSORS
        ) * np.uint64(SIZE)

    def slots(self, pages: list[int]) -> torch.Tensor:
        """Token slots of whole pages, as SGLang's allocator gives them."""
        each = torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)
        return each.reshape(-1).to(self.device)

    def close(self) -> None:
        """Let the memory go."""
        streams.unregister(self.device, self.region.address)


def check_layers_come_one_by_one(world: World) -> None:
    """Each launch moves one layer of all pages, and nothing beside it."""
    world.host[:] = np.random.default_rng(2).integers(256, size=world.host.shape, dtype=np.uint8)
    before = [each.cpu().clone() for each in world.buffers]
    pages = [20, 3, 7, 31]
    world.stream.follow()
    numbers = world.stream.pages(world.slots(pages), PAGE)
    assert numbers.tolist() == pages
    source = world.stream.upload(world.rows[:4])
    for layer in range(LAYERS):
        mark = world.stream.scatter(world.pack, numbers, slice(2 * layer, 2 * layer + 2), source)
        mark.wait()
        for tensor in range(TENSORS):
            now = world.buffers[tensor].cpu()
            for place, page in enumerate(pages):
                if tensor < 2 * layer + 2:
                    assert (now[page].numpy() == world.host[place, tensor]).all()
                else:
                    assert torch.equal(now[page], before[tensor][page])
            others = [page for page in range(PAGES) if page not in pages]
            assert torch.equal(now[others], before[tensor][others])
    assert mark.done()


def check_pages_come_back_whole(world: World) -> None:
    """What is gathered is what lies in the pool, tensor by tensor."""
    pages = [5, 4, 30]
    world.host[:] = 0
    world.stream.follow()
    numbers = world.stream.pages(world.slots(pages), PAGE)
    world.stream.gather(world.pack, numbers, world.stream.upload(world.rows[10:13]))
    for place, page in enumerate(pages):
        for tensor, buffer in enumerate(world.buffers):
            assert (world.host[10 + place, tensor] == buffer[page].cpu().numpy()).all()
    assert not world.host[:10].any()
    assert not world.host[13:].any()


def check_pieces_land_with_their_sums(world: World) -> None:
    """From memory of the device, some pages of one layer and nothing beside them; the sums are those of their bytes."""
    world.host[:] = np.random.default_rng(3).integers(256, size=world.host.shape, dtype=np.uint8)
    before = [each.cpu().clone() for each in world.buffers]
    tensors, pages, which = slice(4, 6), [20, 3, 7], np.array([0, 2])
    staging = torch.zeros(3 * 2 * SIZE, dtype=torch.uint8, device=world.device)
    places = np.arange(6, dtype=np.uint64).reshape(3, 2) * np.uint64(SIZE)
    rows, sizes = np.uint64(staging.data_ptr()) + places, np.full(2, SIZE)
    numbers = world.slots(pages)
    world.stream.follow()
    world.stream.fill(staging, rows, world.rows[:3, tensors], sizes)
    some = world.stream.some(world.stream.pages(numbers, PAGE), which)
    source = world.stream.upload(rows[which])
    blocks = world.stream.land(world.pack, some, tensors, source, sums=True)
    want = checksum.sums(world.rows[which][:, tensors], sizes)
    for tensor in range(2):
        assert (checksum.finish(np.ascontiguousarray(blocks[:, tensor]), SIZE) == want[:, tensor]).all()
    for tensor, buffer in enumerate(world.buffers):
        for page in range(PAGES):
            place = pages.index(page) if page in (20, 7) and tensor in (4, 5) else None
            expected = before[tensor][page].numpy() if place is None else world.host[place, tensor]
            assert (buffer[page].cpu().numpy() == expected).all()
    assert world.stream.land(world.pack, some, tensors, source, sums=False).size == 0


def check_the_probe_finds_what_does_not_work(world: World) -> None:
    """It passes where bytes come back, and says so where they do not."""
    sizes = np.full(TENSORS, SIZE)
    streams.check(world.stream, world.pack, world.rows[:2], sizes)
