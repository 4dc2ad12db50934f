"""Registered host memory on a GPU: kernels and copies reach it under its own address, and it can be let go anywhere."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tutti_sglang.kernels import pinning
from tutti_sglang.memory import Region

pytestmark = pytest.mark.gpu


@pytest.fixture
def region() -> Iterator[Region]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.zeros(1, device="cuda")  # makes the context
    made = Region(4 << 20)
    yield made
    made.close()


def _is_pinned(region: Region) -> bool:
    return torch.from_numpy(region.view).is_pinned()


def test_it_is_pinned_until_another_thread_releases_it(region: Region) -> None:
    assert not _is_pinned(region)
    pin = pinning.pin(region.address, region.size)
    assert pin[:2] == (True, "")
    assert _is_pinned(region)
    region.view[:] = np.arange(region.size, dtype=np.uint64).astype(np.uint8)
    assert torch.equal(torch.from_numpy(region.view).cuda(non_blocking=True).cpu(), torch.from_numpy(region.view))
    thread = threading.Thread(target=pin.release)
    thread.start()
    thread.join()
    assert not _is_pinned(region)


def test_memory_that_is_not_there_is_a_reason(region: Region) -> None:
    pin = pinning.pin(1 << 46, 1 << 20)
    assert not pin.pinned
    assert "cuMemHostRegister" in pin.reason
