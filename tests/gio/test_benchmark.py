"""The benchmark runs at a small size, on the mover that every machine has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tutti_sglang.kernels import gio_native

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(gio_native.compiler() is None, reason="no C++ compiler")
def test_it_measures_and_keeps_its_rows(tmp_path: Path) -> None:
    arguments = ["--mover", "twin", "--seconds", "0", "--bytes", "1MiB", "--sizes", "4KiB", "64KiB"]
    command = [sys.executable, "-m", "benchmarks.gio", *arguments, "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["size"], row["ios"]) for row in rows] == [(4096, 256), (65536, 16)]
    assert all(row["ios_per_second"] > 0 for row in rows)
    assert len(done.stdout.splitlines()) == 4
