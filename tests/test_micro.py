"""The micro-benchmarks run; their figures are not looked at here."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_micro_benchmark_runs() -> None:
    options = ["-q", "--benchmark-disable", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "benchmarks/micro", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
