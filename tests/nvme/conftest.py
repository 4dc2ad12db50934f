"""One guest for all tests of this folder."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.nvme import machine
from tests.nvme.machine import Controller, Drive
from tutti_sglang.kernels import gio_native

MIB = 1 << 20
SIZE = 64 * MIB
MEDIA_ERROR = 40 * MIB
_SCRIPT = """
from tests.nvme import bench, checks_drive, checks_mover, checks_pci, checks_store

bench.run([checks_pci, checks_drive, checks_mover, checks_store])
"""


def controllers() -> list[Controller]:
    """MAIN: two namespaces, of which the first has a bad block; WIDE: no MDTS; SLOW: four commands a second; GUARD: a
    file system that must survive."""
    injected = [{"event": "read_aio", "iotype": "read", "errno": 5, "sector": MEDIA_ERROR // 512, "once": False}]
    bad = {"driver": "raw", "file": {"driver": "blkdebug", "image": "{image}", "inject-error": injected}}
    slow = {"driver": "throttle", "throttle-group": "slow", "file": {"driver": "raw", "file": "{image}"}}
    return [
        Controller("MAIN", [Drive("four", SIZE, 4096, node=bad), Drive("half", SIZE, 512)], "mdts=5,max_ioqpairs=8"),
        Controller("WIDE", [Drive("wide", SIZE)], "mdts=0"),
        Controller("SLOW", [Drive("slow", SIZE, node=slow)], "mdts=5"),
        Controller("GUARD", [Drive("guard", SIZE)]),
    ]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder: images, logs."""
    return tmp_path_factory.mktemp("nvme")


@pytest.fixture(scope="session")
def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """What became of each check in the guest."""
    if gio_native.library() is None:
        pytest.skip("the native library of gio was not built: install g++ 12 or newer, then reinstall")
    mkfs = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if mkfs is None:
        pytest.skip("mkfs.ext4 is not installed: apt-get install e2fsprogs")
    guard = folder / "guard.img"
    with open(guard, "wb") as image:
        image.truncate(SIZE)
    subprocess.run([mkfs, "-q", "-F", guard], check=True)
    shutil.copy(guard, folder / "guard.before")
    try:
        results = machine.boot(folder, controllers(), _SCRIPT)
    except machine.Missing as missing:
        pytest.skip(str(missing))
    return {result["name"]: result for result in results}
