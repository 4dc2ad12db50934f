"""The Triton kernels on a GPU against their twin: pool in device memory, dense side in device or pinned host memory."""

import pytest
import torch

from tests.kernels import pack_suite as suite
from tutti_sglang.kernels.pack import Paged, TorchPack, TritonPack

pytestmark = pytest.mark.gpu

SHAPES = {
    "one row": [(Paged(0, 131072, 1, 0, 1, 0, 131072), 6 * 131072)] * 2,
    "rows with gaps": [(Paged(0, 64 * 1280, 64, 1280, 1, 0, 1152), 6 * 64 * 1280)],
    "heads outside": [(Paged(0, 65536, 16, 256, 8, 16 * 256, 256), 6 * 65536)],
    "odd bytes": [(Paged(0, 700, 7, 99, 3, 33, 31), 6 * 700), (Paged(0, 5, 1, 0, 1, 0, 5), 30)],
}


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.mark.parametrize("shapes", [pytest.param(shapes, id=name) for name, shapes in SHAPES.items()])
def test_the_kernel_agrees_with_its_twin(device: torch.device, shapes: list[tuple[Paged, int]]) -> None:
    for seed in range(5):
        suite.check_gather(TritonPack, shapes, seed, device)
        suite.check_scatter(TritonPack, shapes, seed, device)


def test_the_dense_side_may_be_pinned_host_memory(device: torch.device) -> None:
    pool = suite.pool_of(SHAPES["one row"], 1, device)
    staging = torch.zeros((4, 2 * 131072), dtype=torch.uint8, pin_memory=True)
    starts = [[row.data_ptr(), row.data_ptr() + 131072] for row in staging]
    pages, dense = torch.tensor([5, 0, 2, 3], device=device), torch.tensor(starts, device=device)
    sums = TritonPack(pool.tensors, device).gather(pages, dense)
    torch.cuda.synchronize()
    expected = torch.cat([buffer.view(6, -1)[pages] for buffer in pool.buffers], dim=1)
    assert torch.equal(staging, expected.cpu())
    places = torch.tensor([[row.data_ptr(), row.data_ptr() + 131072] for row in expected], device=device)
    assert torch.equal(sums, TorchPack(pool.tensors, device).gather(pages, places))
