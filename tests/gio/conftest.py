"""The native half of gio, built once from the source tree."""

import ctypes

import pytest

from tutti_sglang.kernels import gio_native


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if gio_native.compiler() is None:
        pytest.skip("no C++ compiler: the software controller and the CPU twin cannot be built")
    return gio_native.current(tmp_path_factory.mktemp("gio"))
