"""What the drive gives to fio: direct I/O of one size at a depth, over one file that is laid out once."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 16 << 20


class Fio:
    """A contender like the workers, but for `busy`: fio has no Python in its process."""

    def __init__(self, directory: Path, page_bytes: int, pages: int, options: Mapping[str, Any]) -> None:
        """`options`: fio's own, over `iodepth=32`. Raises RuntimeError where fio is not installed."""
        if not shutil.which("fio"):
            raise RuntimeError("fio is not installed (apt-get install fio): no baseline of the drive itself")
        directory.mkdir(parents=True)
        self._file = directory / "fio.data"
        self._size = page_bytes * pages
        self._directory = directory
        settings = {"ioengine": _engine(), "iodepth": 32, "direct": 1, "bs": page_bytes, "size": self._size}
        self._settings = settings | dict(options)
        self._lay_out()
        self.description = " ".join(f"{name}={value}" for name, value in self._settings.items())

    def measure(self, operation: str, beside: str) -> dict[str, Any]:
        """`put` is a sequential write over the file, `get` a sequential read, `mixed` half of each."""
        kind = {"put": "write", "get": "read", "hot": "read", "mixed": "rw"}[operation]
        command = [
            "fio",
            "--name=tutti",
            f"--filename={self._file}",
            f"--rw={kind}",
            "--output-format=json",
            "--thread",
        ]
        command += [f"--{name}={value}" for name, value in self._settings.items()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"fio: {done.stderr.strip() or done.stdout.strip()}")
        return {"operation": operation, "beside": beside, **_figures(done.stdout, kind)}

    def close(self) -> None:
        """Remove the file."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _lay_out(self) -> None:
        random = np.random.default_rng(0)
        with self._file.open("wb") as file:
            for start in range(0, self._size, CHUNK):
                file.write(random.bytes(min(CHUNK, self._size - start)))
            file.flush()
            os.fsync(file.fileno())


def _figures(output: str, kind: str) -> dict[str, Any]:
    job = json.loads(output[output.index("{") :])["jobs"][0]
    sides = [job[side] for side in (("read", "write") if kind == "rw" else (kind,))]
    seconds = max(side["io_bytes"] / side["bw_bytes"] for side in sides if side["bw_bytes"])
    share = seconds / 100
    return {
        "bytes": sum(side["io_bytes"] for side in sides),
        "seconds": seconds,
        "cpu_user": job["usr_cpu"] * share,
        "cpu_system": job["sys_cpu"] * share,
    }


def _engine() -> str:
    """io_uring where fio has it and the kernel lets us, else libaio."""
    known = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, timeout=10, check=False).stdout
    probe = [
        "fio",
        "--name=probe",
        "--ioengine=io_uring",
        "--rw=write",
        "--size=4k",
        "--filename=/dev/null",
        "--thread",
    ]
    if (
        re.search(r"\bio_uring\b", known)
        and not subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode
    ):
        return "io_uring"
    return "libaio"
