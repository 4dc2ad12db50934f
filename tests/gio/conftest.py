"""The native half of gio, built once from the source tree, and rigs with it."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gio.rigs import Start, rigs
from tutti_sglang.kernels import gio_native


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if gio_native.compiler() is None:
        pytest.skip("no C++ compiler: the software controller and the CPU twin cannot be built")
    return gio_native.current(tmp_path_factory.mktemp("gio"))


@pytest.fixture
def start(native: ctypes.CDLL, tmp_path: Path) -> Iterator[Start]:
    with rigs(native, tmp_path) as made:
        yield made
