"""Copies and checksums: the native functions and their numpy twins. 32 MiB in rows of one size."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.micro.conftest import Measure
from tutti_sglang import checksum, memory
from tutti_sglang.kernels import native
from tutti_sglang.memory import Region, check_rows

TOTAL = 32 << 20
Rows = npt.NDArray[np.uint64]


@pytest.fixture(scope="module")
def regions() -> tuple[Region, Region]:
    source, target = Region(TOTAL), Region(TOTAL)
    source.view[:] = np.random.default_rng(0).integers(256, size=TOTAL, dtype=np.uint8)
    target.view[:] = 0
    return source, target


@pytest.fixture(params=["native", "numpy"])
def twin(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.library() is None:
        pytest.skip(native.unavailable_reason())
    return str(request.param)


@pytest.fixture(params=[4 << 10, 64 << 10, 1 << 20], ids=["4KiB", "64KiB", "1MiB"])
def rows(request: pytest.FixtureRequest, regions: tuple[Region, Region]) -> tuple[Rows, Rows, list[int]]:
    """(destination, source, sizes)."""
    starts = np.arange(0, TOTAL, request.param, dtype=np.uint64)[:, None]
    source, target = regions
    return starts + np.uint64(target.address), starts + np.uint64(source.address), [request.param]


def test_copy_rows(moving: Measure, twin: str, rows: tuple[Rows, Rows, list[int]]) -> None:
    copy: Callable[..., None] = memory.copy_rows if twin == "native" else memory._copy_rows
    arguments = check_rows(*rows)
    moving(lambda: copy(*arguments), TOTAL)


def test_sums(moving: Measure, twin: str, rows: tuple[Rows, Rows, list[int]]) -> None:
    _, source, sizes = check_rows(*rows)
    if twin == "native":
        moving(lambda: checksum.sums(source, sizes), TOTAL)
    else:
        moving(lambda: checksum._sum_rows(None, source, sizes), TOTAL)


def test_copy_and_sum(moving: Measure, twin: str, rows: tuple[Rows, Rows, list[int]]) -> None:
    function: Callable[..., checksum.Sums] = checksum.copy_and_sum if twin == "native" else checksum._sum_rows
    arguments = check_rows(*rows)
    moving(lambda: function(*arguments), TOTAL)


def test_roots(moving: Measure, twin: str) -> None:
    table = np.random.default_rng(0).integers(2**63, size=(128, 64), dtype=np.uint64)
    moving(lambda: checksum.roots(table) if twin == "native" else checksum._hash_rows(table), table.nbytes)
