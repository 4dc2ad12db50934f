"""What the facts about a machine mean: what would be used, what is missing, and the command that fixes it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum

import msgspec

from tutti_sglang import SGLANG_VERSION
from tutti_sglang.cli.machine import DriveFacts, Machine
from tutti_sglang.config import Config
from tutti_sglang.units import format_size


class Level(IntEnum):
    """How bad: GOOD; NOTE: better hardware or settings would be used if they were there; WARN: it works, but slowly or
    with a risk; FAIL: it does not work."""

    GOOD, NOTE, WARN, FAIL = range(4)


class Finding(msgspec.Struct, frozen=True):
    """`subject`: what was looked at; `found`: what it is like; `fix`: the next command, where there is one."""

    level: Level
    subject: str
    found: str
    fix: str = ""


def findings(machine: Machine, config: Config | None, launch: Sequence[str] = ()) -> list[Finding]:
    """All that there is to say, in the order in which things depend on one another. `launch`: the flags of a server."""
    return [
        *_software(machine),
        *_engine(machine),
        *_memory(machine, config),
        *_places(machine, config),
        *_hardware(machine),
        *_flags(_options(launch)),
    ]


def chosen(machine: Machine) -> str:
    """Which engine `engine = auto` takes here."""
    if machine.native_missing:
        return "threads (Python)"
    return "native threads" if machine.uring_refused else "io_uring (native)"


def _software(machine: Machine) -> Iterator[Finding]:
    if not machine.sglang:
        yield Finding(Level.WARN, "sglang", "not installed here", f"pip install sglang=={SGLANG_VERSION}")
    elif machine.sglang != SGLANG_VERSION:
        found = f"{machine.sglang}, but {SGLANG_VERSION} is what was tested: hooks may not take"
        yield Finding(Level.FAIL, "sglang", found, f"pip install sglang=={SGLANG_VERSION}")
    else:
        yield Finding(Level.GOOD, "sglang", machine.sglang)


def _engine(machine: Machine) -> Iterator[Finding]:
    if machine.native_missing:
        fix = "install a C++20 compiler (apt-get install g++), then: pip install --force-reinstall tutti-sglang"
        yield Finding(Level.WARN, "engine", f"threads (Python): {machine.native_missing}", fix)
    elif machine.uring_refused:
        yield Finding(Level.WARN, "engine", f"native threads: {machine.uring_refused}", _allow_uring(machine))
    else:
        yield Finding(Level.GOOD, "engine", "io_uring (native)")


def _allow_uring(machine: Machine) -> str:
    if machine.uring_disabled:
        return "sysctl -w kernel.io_uring_disabled=0"
    if machine.seccomp:
        return (
            "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile "
            "(docker run --security-opt seccomp=PROFILE.json)"
        )
    return "a kernel of 5.11 or newer has io_uring"


def _memory(machine: Machine, config: Config | None) -> Iterator[Finding]:
    if machine.locked_memory and not machine.uring_refused:
        fix = "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
        yield Finding(Level.NOTE, "locked memory", machine.locked_memory, fix)
    else:
        yield Finding(Level.GOOD, "locked memory", "enough to register staging with the kernel")
    if config and machine.memory_bytes < 4 * config.staging_size:
        found = f"{format_size(machine.memory_bytes)}, of which staging_size takes {format_size(config.staging_size)}"
        yield Finding(Level.WARN, "memory", found, 'lower "staging_size" in the extra config')
    if machine.huge_pages == "never":
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding(Level.NOTE, "huge pages", "off: staging uses pages of 4KiB", fix)


def _places(machine: Machine, config: Config | None) -> Iterator[Finding]:
    if not machine.drives:
        fix = "tutti doctor --dir /mnt/nvme0/tutti"
        yield Finding(Level.NOTE, "storage_dirs", "none given: drives were not looked at", fix)
    for drive in machine.drives:
        yield from _drive(drive, config)
    mounts = [drive.mount for drive in machine.drives]
    if len(set(mounts)) < len(mounts):
        found = "several of them share one file system: no more bandwidth than one of them has"
        yield Finding(Level.WARN, "storage_dirs", found, "name one directory on each NVMe drive")
    if machine.index_network:
        found = f"on a network file system ({machine.index_network}): refused"
        yield Finding(Level.FAIL, "index_dir", found, 'set "index_dir" to a directory on a local disk')


def _drive(drive: DriveFacts, config: Config | None) -> Iterator[Finding]:
    subject = drive.path
    if drive.problem:
        yield Finding(Level.FAIL, subject, drive.problem, f"ls -ld {drive.path}; the path must be real and writable")
        return
    if drive.memory:
        yield Finding(
            Level.WARN, subject, f"{drive.filesystem}: memory, not a disk; a reboot empties it", "use a drive"
        )
    if drive.network:
        yield Finding(
            Level.WARN, subject, f"on {drive.network}: works, at the network's speed", "use a local NVMe drive"
        )
    if drive.rotational:
        found = "a spinning disk, says the kernel (of virtual disks too): recomputing may be faster"
        yield Finding(Level.NOTE, subject, found, f"tutti bench --dir {drive.path}")
    if drive.buffered and not drive.memory:
        found = f"no O_DIRECT ({drive.buffered}): through the page cache, which costs memory and CPU"
        yield Finding(Level.WARN, subject, found, "use ext4 or xfs")
    if drive.mount == "/" and not drive.network:
        yield Finding(Level.NOTE, subject, "on the root file system, which others fill too", "mount a drive of its own")
    need = (config.min_free_space if config else 0) + (config.segment_size if config else 0)
    free = f"{format_size(drive.free_bytes)} of {format_size(drive.total_bytes)} free on {drive.filesystem}"
    if drive.free_bytes < need:
        fix = "free some space, or lower min_free_space or segment_size"
        yield Finding(Level.FAIL, subject, f"{free}: no room for one segment beside min_free_space", fix)
    else:
        direct = "O_DIRECT" if not drive.buffered else "page cache"
        new = "" if drive.exists else "will be created; "
        yield Finding(Level.GOOD, subject, f"{new}{free}, {direct}")


def _hardware(machine: Machine) -> Iterator[Finding]:
    if not machine.gpu:
        yield Finding(Level.NOTE, "gpu", "none: `make serve` and `tutti demo` use the CPU reference platform")
        return
    yield Finding(Level.GOOD, "gpu", machine.gpu)
    if not machine.gds:
        found = "no nvidia-fs: the direct path goes through pinned staging"
        yield Finding(Level.NOTE, "gds", found, "apt-get install nvidia-gds && modprobe nvidia-fs")
    else:
        yield Finding(Level.GOOD, "gds", machine.gds)
    if not machine.iommu_groups or not machine.vfio:
        found = "no IOMMU or no /dev/vfio: the GPU cannot submit its own I/O to a drive"
        fix = "boot with intel_iommu=on (amd_iommu=on), then: modprobe vfio-pci"
        yield Finding(Level.NOTE, "vfio", found, fix)
    else:
        owned = [each.address for each in machine.nvme if each.driver == "vfio-pci"]
        found = f"drives given to vfio-pci: {', '.join(owned) or 'none'} of {len(machine.nvme)}"
        yield Finding(Level.GOOD if owned else Level.NOTE, "vfio", found)


def _flags(options: Mapping[str, str]) -> Iterator[Finding]:
    """What a launch line would do."""
    if not options:
        return
    if options.get("--hicache-storage-backend") != "tutti":
        yield Finding(Level.FAIL, "launch", "the tier is not asked for", "add --hicache-storage-backend tutti")
    if "--enable-hierarchical-cache" not in options:
        yield Finding(Level.FAIL, "launch", "HiCache is off", "add --enable-hierarchical-cache")
    page = options.get("--page-size")
    if page and page.isdecimal() and int(page) < 16:
        found = f"pages of {page} token(s): tens of times more I/O than with 64"
        yield Finding(Level.WARN, "launch", found, "leave --page-size out (64 is chosen), or set it to 64")
    if options.get("--hicache-mem-layout") == "layer_first":
        found = "layer_first: each page is scattered over host memory"
        yield Finding(Level.NOTE, "launch", found, "leave --hicache-mem-layout out: page_first_direct is chosen")
    ratio = options.get("--hicache-ratio")
    if ratio and ratio.replace(".", "", 1).isdigit() and float(ratio) <= 1:
        found = f"--hicache-ratio {ratio}: host memory is not larger than the GPU's, SGLang then prefetches nothing"
        yield Finding(Level.WARN, "launch", found, "set --hicache-ratio to 2 or more, or --hicache-size")
    if options.get("--hicache-storage-backend") == "dynamic" and "interface_v1" not in str(options):
        found = "`dynamic` without interface_v1 copies every page through a tensor"
        yield Finding(Level.WARN, "launch", found, 'add "interface_v1": 1 to the extra config')


def _options(launch: Sequence[str]) -> dict[str, str]:
    """`--a b --c=d --e` → {--a: b, --c: d, --e: ''}."""
    found: dict[str, str] = {}
    name = ""
    for word in launch:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        elif name and not found[name]:
            found[name] = word
    return found
