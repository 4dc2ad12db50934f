"""An SGLang plugin of tests and benchmarks: every read of the drives takes longer, by so many nanoseconds a byte."""

import os
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "TUTTI_TEST_SLOW_DISK"


def register() -> None:
    """Entry point: in scheduler processes, below the pure Python engine."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from tutti_sglang.engine.batch import Operation
    from tutti_sglang.engine.system import SYSTEM

    transfer = type(SYSTEM).transfer

    def slow(system: Any, operation: Operation, place: Any, iovecs: Any) -> int:
        moved = transfer(system, operation, place, iovecs)
        file = Path(os.environ[VARIABLE])
        if operation == Operation.READ and file.exists():
            time.sleep(moved * float(file.read_text()) / 1e9)
        return moved

    type(SYSTEM).transfer = slow  # type: ignore[method-assign,assignment]


def install(site: Path) -> None:
    """Make `site`, to be put on a server's PYTHONPATH, a distribution that offers this plugin."""
    info = site / "tutti_test_slow_disk-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tutti-test-slow-disk\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nslow = tutti_test_slow_disk:register\n")
    (site / "tutti_test_slow_disk.py").write_text(Path(__file__).read_text())
