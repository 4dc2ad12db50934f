"""What is computed for each batch before a byte moves: 128 pages of a model with 64 tensors a page."""

from typing import Any

import numpy as np
import pytest

from tutti_sglang.engine.batch import IoClass, Operation
from tutti_sglang.engine.packed import native_plan
from tutti_sglang.engine.plan import Objects, object_addresses, plan
from tutti_sglang.engine.transfers import coalesce, malformed
from tutti_sglang.geometry import Geometry, group_size
from tutti_sglang.kernels import native
from tutti_sglang.layout import Order, PageMap, pages_of

PAGES, LAYERS, TENSOR = 128, 32, 32 << 10
TENSORS = (TENSOR,) * 2 * LAYERS
SEGMENT = 1 << 30


@pytest.fixture(params=[1, 4], ids=["one drive", "four drives"])
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return Geometry(TENSORS, group_size(TENSORS), tuple(range(request.param)), SEGMENT)


def test_rows_of_a_batch_of_pages(benchmark: Any) -> None:
    base = tuple(1 << 40 | tensor << 32 for tensor in range(len(TENSORS)))
    pages = PageMap(Order.LAYER, base, (TENSOR,) * len(TENSORS), TENSORS)
    indices = np.arange(PAGES * 64, dtype=np.int64)
    rows = benchmark(lambda: pages.rows(pages_of(indices, 64, PAGES)))
    assert rows.shape == (PAGES, len(TENSORS))


def test_locate_a_batch_of_slots(benchmark: Any, geometry: Geometry) -> None:
    slots = np.arange(PAGES, dtype=np.int64)
    drives, _ = benchmark(geometry.locate, slots)
    assert drives.shape == (PAGES, len(TENSORS))


def objects(geometry: Geometry) -> tuple[Objects, Any]:
    numbers = np.arange(PAGES, dtype=np.int64)
    every = np.arange(len(TENSORS))
    base = object_addresses(1 << 40, PAGES, geometry.object_size)
    return Objects(np.array([0]), (geometry,), np.zeros_like(numbers), numbers, every), base


@pytest.mark.parametrize("how", [plan, native_plan])
def test_plan_a_batch_of_objects(benchmark: Any, geometry: Geometry, how: Any) -> None:
    if how is native_plan and native.library() is None:
        pytest.skip(native.unavailable_reason())
    batch = benchmark(how, *objects(geometry), Operation.READ, IoClass.DEMAND)
    assert len(batch) == PAGES * len(TENSORS)


def test_coalesce_a_batch_of_ioctx(benchmark: Any, geometry: Geometry) -> None:
    batch = plan(*objects(geometry), Operation.READ, IoClass.DEMAND)
    transfers = benchmark(lambda: coalesce(batch, malformed(batch, SEGMENT), SEGMENT, 1 << 20))
    assert transfers[-1].last == len(batch)
