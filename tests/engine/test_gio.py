"""The engine over gio's protocol passes the suite."""

import ctypes

import pytest

from tutti_sglang.engine import Engine
from tutti_sglang.engine.gio import GioEngine
from tutti_sglang.kernels import gio_native
from tutti_sglang.memory import Region
from tutti_sglang.testing.engine_suite import EngineSuite
from tutti_sglang.testing.faults import FaultPlan
from tutti_sglang.testing.rig import SEGMENT


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if gio_native.compiler() is None:
        pytest.skip("no C++ compiler: the software controller and the CPU twin cannot be built")
    return gio_native.current(tmp_path_factory.mktemp("gio"))


class TestGioEngine(EngineSuite):
    @pytest.fixture(autouse=True)
    def _library(self, native: ctypes.CDLL) -> None:
        self.native = native

    def create(self, memory: Region, *, depth: int, max_io: int, plan: FaultPlan | None = None) -> Engine:
        # The suite knows no blocks: it has IOCTX of single bytes, so the controllers' logical blocks are bytes here.
        packed = plan.packed() if plan else None
        return GioEngine(SEGMENT, depth, max_io, self.native, block=1, plan=packed)
