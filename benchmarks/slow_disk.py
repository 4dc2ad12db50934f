"""An SGLang plugin of tests and benchmarks: every read of the drives takes longer, by so many nanoseconds a byte.

It sleeps where the store calls the native engine: for all above, the drive is slow.
"""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti_sglang.engine.moving import Got, Read

VARIABLE = "TUTTI_TEST_SLOW_DISK"


def register() -> None:
    """Entry point: in scheduler processes."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from tutti_sglang.engine.uring import UringEngine

    read = UringEngine.read

    def slow(engine: UringEngine, request: "Read", *others: Any) -> "Got":
        got = read(engine, request, *others)
        file = Path(os.environ[VARIABLE])
        if file.exists():
            time.sleep(int(got.moved.nbytes.sum()) * float(file.read_text()) / 1e9)
        return got

    UringEngine.read = slow  # type: ignore[method-assign,assignment]


def install(site: Path) -> None:
    """Make `site`, to be put on a server's PYTHONPATH, a distribution that offers this plugin."""
    info = site / "tutti_test_slow_disk-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tutti-test-slow-disk\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nslow = tutti_test_slow_disk:register\n")
    (site / "tutti_test_slow_disk.py").write_text(Path(__file__).read_text())
