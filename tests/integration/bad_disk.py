"""An SGLang plugin of tests: what a file says happens to every read of the drives, below the pure Python engine: `slow`
and nanoseconds a byte, `fail`, or nothing."""

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "TUTTI_TEST_BAD_DISK"


def register() -> None:
    """Entry point: in scheduler processes."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from tutti_sglang.engine.batch import Operation
    from tutti_sglang.engine.system import SYSTEM

    transfer = type(SYSTEM).transfer

    def bad(system: Any, operation: Operation, place: Any, iovecs: Any) -> int:
        file = Path(os.environ[VARIABLE])
        words = file.read_text().split() if operation == Operation.READ and file.exists() else []
        if words == ["fail"]:
            return -errno.EIO
        moved = transfer(system, operation, place, iovecs)
        if words:
            time.sleep(moved * float(words[1]) / 1e9)
        return moved

    type(SYSTEM).transfer = bad  # type: ignore[method-assign,assignment]
