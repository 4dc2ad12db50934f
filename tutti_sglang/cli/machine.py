"""What this machine is, as plain facts: looked at once, judged elsewhere (`advice.py`)."""

import importlib.metadata
import os
import platform
import shutil
import sqlite3
from pathlib import Path

import msgspec

from tutti_sglang.config import Config, raw_name
from tutti_sglang.engine.select import locked_memory
from tutti_sglang.engine.uring import uring_refused
from tutti_sglang.errors import TuttiError
from tutti_sglang.kernels import native
from tutti_sglang.memory import memory_limit
from tutti_sglang.store import filesystem, probe

_NVME_CLASS = "0x010802"


class DriveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One of `storage_dirs`. `problem`: why it cannot be used at all; `buffered`: why not with O_DIRECT; `network`: the
    network file system it is on; `mount`: where its file system is mounted; `memory`: it is no disk."""

    path: str
    exists: bool = True
    problem: str = ""
    buffered: str = ""
    network: str = ""
    mount: str = "/"
    filesystem: str = ""
    rotational: bool = False
    memory: bool = False
    total_bytes: int = 0
    free_bytes: int = 0


class NvmeFacts(msgspec.Struct, frozen=True):
    """An NVMe controller on the PCI bus and the driver that has it (empty: none)."""

    address: str
    driver: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that decide what the tier does here. Texts that say why something is missing are empty where it is
    there; sizes in bytes; versions are empty where the thing is not installed."""

    python: str
    kernel: str
    sqlite: str
    sglang: str = ""
    native_missing: str = ""
    uring_refused: str = ""
    uring_disabled: int = 0
    seccomp: bool = False
    locked_memory: str = ""
    memory_bytes: int = 0
    huge_pages: str = ""
    gpu: str = ""
    gds: str = ""
    iommu_groups: int = 0
    vfio: bool = False
    nvme: tuple[NvmeFacts, ...] = ()
    drives: tuple[DriveFacts, ...] = ()
    index_network: str = ""
    fio: bool = False


def look(config: Config | None) -> Machine:
    """The machine as it is now; with settings, their directories too. A probe file is written to and removed from
    directories that exist."""
    return Machine(
        python=platform.python_version(),
        kernel=platform.release(),
        sqlite=sqlite3.sqlite_version,
        sglang=_version("sglang"),
        native_missing="" if native.library() else native.unavailable_reason(),
        uring_refused=uring_refused(),
        uring_disabled=int(_read("/proc/sys/kernel/io_uring_disabled") or 0),
        seccomp="Seccomp:\t2" in _read("/proc/self/status"),
        locked_memory=_locked(config),
        memory_bytes=memory_limit(),
        huge_pages=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        gpu=_gpu(),
        gds=_read("/proc/driver/nvidia-fs/version").strip(),
        iommu_groups=_count("/sys/kernel/iommu_groups"),
        vfio=Path("/dev/vfio/vfio").exists(),
        nvme=tuple(_nvme()),
        drives=tuple(_drive(path) for path in config.storage_dirs if not raw_name(path)) if config else (),
        index_network=_network(_existing(str(config.index_path))) if config else "",
        fio=shutil.which("fio") is not None,
    )


def _locked(config: Config | None) -> str:
    size = (config or Config(storage_dirs=())).staging_size
    text = locked_memory(size)
    return "" if text == "staging registered" else text


def _drive(path: str) -> DriveFacts:
    if os.path.islink(path):
        return DriveFacts(path=path, problem=f"it is a symbolic link to {os.path.realpath(path)}")
    there = _existing(path)
    exists = there == path
    mount, kind = _mount(there)
    try:
        found = os.statvfs(there)
        fd = os.open(there, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        return DriveFacts(path=path, exists=exists, problem=os.strerror(error.errno or 0), mount=mount, filesystem=kind)
    problem = buffered = ""
    try:
        buffered = probe.direct_io(fd) if exists or os.access(there, os.W_OK) else ""
        problem = "" if os.access(there, os.W_OK | os.X_OK) else "this user may not write there"
    except OSError as error:
        problem = os.strerror(error.errno or 0)
    finally:
        os.close(fd)
    return DriveFacts(
        path=path,
        exists=exists,
        problem=problem,
        buffered=buffered,
        network=_network(there),
        mount=mount,
        filesystem=kind,
        rotational=_rotational(there),
        memory=kind in ("tmpfs", "ramfs"),
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
    )


def _existing(path: str) -> str:
    """The path, or the nearest folder above it that exists."""
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _network(path: str) -> str:
    try:
        return filesystem.network_name(Path(path))
    except TuttiError:
        return ""


def _mount(path: str) -> tuple[str, str]:
    """(mount point, file system type) of a path: the longest mount point that holds it (proc(5), mounts)."""
    best, kind = "/", ""
    for line in _read("/proc/self/mounts").splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if os.path.commonpath([point, path]) == point and len(point) >= len(best):
            best, kind = point, fields[2]
    return best, kind


def _rotational(path: str) -> bool:
    device = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    return any(_read(str(place / "queue/rotational")).strip() == "1" for place in (block, block.resolve().parent))


def _nvme() -> list[NvmeFacts]:
    found = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        if _read(str(device / "class")).startswith(_NVME_CLASS):
            driver = device / "driver"
            found.append(NvmeFacts(device.name, driver.resolve().name if driver.exists() else ""))
    return found


def _gpu() -> str:
    """The driver's line about the GPU; no CUDA context is made for it."""
    names = [
        line.split(":", 1)[1].strip()
        for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in _read(str(file)).splitlines()
        if line.startswith("Model:")
    ]
    return ", ".join(names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _chosen(text: str) -> str:
    """`always [madvise] never` → `madvise`."""
    return text.partition("[")[2].partition("]")[0]


def _count(folder: str) -> int:
    path = Path(folder)
    return len(list(path.iterdir())) if path.is_dir() else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
