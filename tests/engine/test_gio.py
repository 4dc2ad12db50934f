"""The engine over gio's protocol passes the suite, and serves whole blocks only, as drives do."""

import ctypes
import errno
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.config import Config
from tutti_sglang.engine import Engine
from tutti_sglang.engine.gio import GioEngine
from tutti_sglang.engine.select import create_engine
from tutti_sglang.engine.staging import Staging
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import gio_native
from tutti_sglang.memory import Region
from tutti_sglang.metrics import Metrics
from tutti_sglang.testing.engine_case import PATIENCE, run
from tutti_sglang.testing.engine_suite import EngineSuite
from tutti_sglang.testing.faults import FaultPlan
from tutti_sglang.testing.rig import SEGMENT, Rig


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


def test_on_a_drive_with_blocks_ioctx_are_whole_blocks(native: ctypes.CDLL, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    engine = GioEngine(SEGMENT, 4, 64 << 10, native)
    rig.attach(engine)
    batch = rig.batch([0, 512, 100, 1024, 4096], [512, 1024, 512, 100, 300 << 10])
    results = run(engine, batch)
    assert results.tolist() == [512, 1024, -errno.EINVAL, -errno.EINVAL, 300 << 10]
    for i in (0, 1, 4):
        assert (rig.in_memory(batch, i) == rig.expected(batch, i)).all()
    assert engine.close(PATIENCE)
    rig.close()


def test_it_is_had_by_its_name(native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(storage_dirs=("/x",), engine="gio", queue_depth=7)
    staging = Staging(1 << 20, Metrics(CollectorRegistry()))
    monkeypatch.setattr(gio_native, "library", lambda: native)
    engine, note = create_engine(config, SEGMENT, staging)
    assert isinstance(engine, GioEngine)
    assert engine.options.depth == 7
    assert "software NVMe controller" in note
    assert engine.close(PATIENCE)
    monkeypatch.setattr(gio_native, "library", lambda: None)
    with pytest.raises(EngineError, match="not built"):
        create_engine(config, SEGMENT, staging)
