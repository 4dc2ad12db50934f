"""An engine's own cost: reads that the page cache serves, from submit to the last result; and staging."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.micro.conftest import Measure
from tutti_sglang.engine import IOCTX_DTYPE, Batch, Engine, IoClass
from tutti_sglang.engine.staging import Staging
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.engine.uring import UringEngine, uring_refused
from tutti_sglang.kernels import native
from tutti_sglang.memory import Region
from tutti_sglang.metrics import Metrics

SEGMENT = 64 << 20


@pytest.fixture(scope="module")
def region() -> Region:
    return Region(SEGMENT)


@pytest.fixture(params=["uring", "pool", "threads"])
def engine(request: pytest.FixtureRequest, region: Region) -> Iterator[Engine]:
    if request.param != "threads" and native.library() is None:
        pytest.skip(native.unavailable_reason())
    if request.param == "uring" and uring_refused():
        pytest.skip(uring_refused())
    made: Engine = (
        ThreadsEngine(SEGMENT, 16, 1 << 20)
        if request.param == "threads"
        else UringEngine(SEGMENT, staging=region, pool=request.param == "pool")
    )
    fd = os.memfd_create("segment")
    os.ftruncate(fd, SEGMENT)
    made.attach(0, 0, fd)
    yield made
    assert made.close(60)
    os.close(fd)


def batch_of(region: Region, count: int, length: int, apart: bool) -> Batch:
    batch = np.zeros(count, dtype=IOCTX_DTYPE)
    places = np.arange(count) * length
    batch["address"] = region.address + places
    batch["offset"] = places * 2 if apart else places
    batch["length"] = length
    return batch


@pytest.mark.parametrize("shape", ["128 apart", "8192 joined"])
def test_read_16_mib(moving: Measure, engine: Engine, region: Region, shape: str) -> None:
    batch = batch_of(region, 128, 128 << 10, True) if shape == "128 apart" else batch_of(region, 8192, 2 << 10, False)

    def read() -> Any:
        return engine.wait(engine.submit(batch, IoClass.DEMAND, time.monotonic() + 60), 60)

    assert (moving(read, 16 << 20) == batch["length"]).all()


def test_submit_and_wait_for_one_ioctx(benchmark: Any, engine: Engine, region: Region) -> None:
    batch = batch_of(region, 1, 4096, False)
    results = benchmark(lambda: engine.wait(engine.submit(batch, IoClass.DEMAND, time.monotonic() + 60), 60))
    assert results.tolist() == [4096]


def test_acquire_and_release_128_extents(benchmark: Any) -> None:
    staging = Staging(64 << 20, Metrics(CollectorRegistry()))

    def cycle() -> None:
        for extent in [staging.acquire(64 << 10) for _ in range(128)]:
            assert extent is not None
            staging.release(extent)

    benchmark(cycle)
    assert staging.used == 0
