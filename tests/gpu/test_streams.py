"""The stream mover on a GPU: pinned memory, launches that nobody waits for, and their order among SGLang's streams."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels import streams_suite as suite

pytestmark = pytest.mark.gpu
SPIN_CYCLES = 100_000_000


@pytest.fixture
def world() -> Iterator[suite.World]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = suite.World(torch.device("cuda", torch.cuda.current_device()))
    yield made
    torch.cuda.synchronize()
    made.close()


def test_layers_come_one_by_one(world: suite.World) -> None:
    suite.check_layers_come_one_by_one(world)


def test_pages_come_back_whole(world: suite.World) -> None:
    suite.check_pages_come_back_whole(world)


def test_pieces_land_with_their_sums(world: suite.World) -> None:
    suite.check_pieces_land_with_their_sums(world)


def test_the_probe_passes_where_bytes_come_back(world: suite.World) -> None:
    suite.check_the_probe_finds_what_does_not_work(world)


def test_nothing_is_waited_for_and_the_forward_pass_comes_after_its_layer(world: suite.World) -> None:
    """A stream that is busy with earlier work holds the copies up, not the caller; who waits for the mark sees them."""
    world.host[:] = 9
    forward = torch.cuda.Stream()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(SPIN_CYCLES)
    world.stream.follow(forward)
    numbers = world.stream.pages(world.slots([3, 4]), suite.PAGE)
    source = world.stream.upload(world.rows[:2])
    marks = [world.stream.scatter(world.pack, numbers, slice(2 * n, 2 * n + 2), source) for n in range(suite.LAYERS)]
    assert not marks[-1].done(), "the copies wait for the forward stream, and the caller does not"
    with torch.cuda.stream(forward):
        for layer, mark in enumerate(marks):
            mark.wait()
            assert (world.buffers[2 * layer][3] == 9).all()


def test_what_is_gathered_was_written_by_then(world: suite.World) -> None:
    """The order of an offload: a kernel that is slow to write its pages, then the copy out of them."""
    compute = torch.cuda.Stream()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(SPIN_CYCLES)
        for buffer in world.buffers:
            buffer[6] = 77
        ready = torch.cuda.Event()
        ready.record(compute)
    ready.synchronize()
    numbers = world.stream.pages(world.slots([6]), suite.PAGE)
    world.stream.gather(world.pack, numbers, world.stream.upload(world.rows[:1]))
    assert (world.host[0] == 77).all()


def test_memory_that_cannot_be_pinned_is_told(world: suite.World) -> None:
    from tutti_sglang.errors import EngineError
    from tutti_sglang.kernels import streams

    with pytest.raises(EngineError, match="cudaHostRegister"):
        streams.register(world.device, 4096, 1 << 20)
