"""Simulated machines: what doctor says of each, and that it names a command for what is missing."""

from typing import Any

import pytest

from tutti_sglang import SGLANG_VERSION
from tutti_sglang.cli.advice import Finding, Level, chosen, findings
from tutti_sglang.cli.machine import DriveFacts, Machine, NvmeFacts
from tutti_sglang.config import Config

GIB = 1 << 30
CONFIG = Config(storage_dirs=("/mnt/nvme0/tutti",))
DRIVE: dict[str, Any] = {
    "path": "/mnt/nvme0/tutti",
    "mount": "/mnt/nvme0",
    "filesystem": "xfs",
    "total_bytes": 2000 * GIB,
    "free_bytes": 1000 * GIB,
}
GOOD: dict[str, Any] = {
    "python": "3.11.7",
    "kernel": "6.8.0",
    "sqlite": "3.45.0",
    "sglang": SGLANG_VERSION,
    "memory_bytes": 512 * GIB,
    "huge_pages": "madvise",
    "gpu": "NVIDIA H100",
    "gds": "GDS version: 1.9",
    "iommu_groups": 40,
    "vfio": True,
    "nvme": (NvmeFacts("0000:41:00.0", "vfio-pci"),),
    "drives": (DriveFacts(**DRIVE),),
    "fio": True,
}


def machine(**changes: Any) -> Machine:
    return Machine(**(GOOD | changes))


def bad(made: Machine, *launch: str) -> list[Finding]:
    return [each for each in findings(made, CONFIG, launch) if each.level > Level.GOOD]


def test_a_machine_that_has_everything_is_good() -> None:
    assert bad(machine()) == []
    assert chosen(machine()) == "io_uring (native)"


@pytest.mark.parametrize(
    ("changes", "level", "subject", "fix"),
    [
        ({"sglang": ""}, Level.WARN, "sglang", f"pip install sglang=={SGLANG_VERSION}"),
        ({"sglang": "0.6.0"}, Level.FAIL, "sglang", f"pip install sglang=={SGLANG_VERSION}"),
        ({"native_missing": "no compiler"}, Level.WARN, "engine", "apt-get install g++"),
        ({"uring_refused": "EPERM", "uring_disabled": 2}, Level.WARN, "engine", "kernel.io_uring_disabled=0"),
        ({"uring_refused": "EPERM", "seccomp": True}, Level.WARN, "engine", "seccomp=PROFILE.json"),
        ({"uring_refused": "ENOSYS"}, Level.WARN, "engine", "5.11"),
        ({"locked_memory": "64KiB of 512MiB"}, Level.NOTE, "locked memory", "ulimit -l unlimited"),
        ({"memory_bytes": GIB}, Level.WARN, "memory", "staging_size"),
        ({"huge_pages": "never"}, Level.NOTE, "huge pages", "transparent_hugepage"),
        ({"gds": ""}, Level.NOTE, "gds", "modprobe nvidia-fs"),
        ({"iommu_groups": 0}, Level.NOTE, "vfio", "intel_iommu=on"),
        ({"index_network": "NFS"}, Level.FAIL, "index_dir", "index_dir"),
        ({"drives": ()}, Level.NOTE, "storage_dirs", "tutti doctor --dir"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(changes: dict[str, Any], level: Level, subject: str, fix: str) -> None:
    (found,) = bad(machine(**changes))
    assert (found.level, found.subject) == (level, subject)
    assert fix in found.fix


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"problem": "this user may not write there"}, Level.FAIL, "may not write"),
        ({"memory": True, "filesystem": "tmpfs", "buffered": "EINVAL"}, Level.WARN, "reboot empties"),
        ({"network": "NFS"}, Level.WARN, "NFS"),
        ({"rotational": True}, Level.NOTE, "spinning"),
        ({"buffered": "EINVAL"}, Level.WARN, "no O_DIRECT"),
        ({"mount": "/"}, Level.NOTE, "root file system"),
        ({"free_bytes": GIB}, Level.FAIL, "no room for one segment"),
    ],
)
def test_what_is_wrong_with_a_drive_is_named(changes: dict[str, Any], level: Level, text: str) -> None:
    (found,) = bad(machine(drives=(DriveFacts(**(DRIVE | changes)),)))
    assert found.level == level
    assert text in found.found
    assert found.fix


def test_two_directories_on_one_file_system_are_no_two_drives() -> None:
    (found,) = bad(machine(drives=(DriveFacts(**DRIVE), DriveFacts(**(DRIVE | {"path": "/mnt/nvme0/two"})))))
    assert "share one file system" in found.found


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        ("--enable-hierarchical-cache", "not asked for"),
        ("--hicache-storage-backend tutti", "HiCache is off"),
        ("--hicache-storage-backend tutti --enable-hierarchical-cache --page-size=1", "pages of 1 token"),
        ("--hicache-storage-backend tutti --enable-hierarchical-cache --hicache-mem-layout layer_first", "scattered"),
        ("--hicache-storage-backend tutti --enable-hierarchical-cache --hicache-ratio 1.0", "prefetches nothing"),
    ],
)
def test_a_launch_line_that_would_disappoint_is_named(launch: str, text: str) -> None:
    (found,) = bad(machine(), *launch.split())
    assert text in found.found
    assert found.fix


def test_a_machine_without_a_gpu_is_no_failure() -> None:
    (found,) = bad(machine(gpu="", gds="", iommu_groups=0))
    assert found.level == Level.NOTE
