"""A PCI function as sysfs shows it: which driver has it, what uses its namespaces, its IOMMU group; and the commands
that give it to VFIO and back. Nothing here changes anything: a wrong bind would cost a user a file system."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tutti_sglang.errors import EngineError

SYS = Path("/sys")
PROC = Path("/proc")

NVME_CLASS = "0x010802"
"""PCI class code of an NVM Express controller."""

_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Function:
    """`uses`: what holds the namespaces now, in words; `neighbours`: other functions of its IOMMU group that have a
    driver which keeps the group from user space; `group`: empty without an IOMMU; `cdev`: its file below
    /dev/vfio/devices, where the kernel has those."""

    address: str
    pci_class: str
    driver: str
    model: str
    group: str
    neighbours: tuple[str, ...]
    namespaces: tuple[str, ...]
    uses: tuple[str, ...]
    cdev: str

    @property
    def is_nvme(self) -> bool:
        """Whether it is an NVMe controller."""
        return self.pci_class == NVME_CLASS

    @property
    def bound(self) -> bool:
        """Whether VFIO has it."""
        return self.driver == "vfio-pci"

    def problem(self) -> str:
        """Why it cannot be used as it is; empty when it can. One line, and the commands that help on further ones."""
        if not self.is_nvme:
            return f"{self.address} is no NVMe controller (class {self.pci_class})"
        if self.uses:
            return f"{self.address} is in use: {'; '.join(self.uses)}. Nothing will be done to it"
        if not self.group:
            return (
                f"{self.address} has no IOMMU group, and without an IOMMU a drive could write anywhere in memory. "
                "Switch VT-d or AMD-Vi on in the firmware, and boot Linux with intel_iommu=on"
            )
        if self.neighbours:
            return (
                f"the IOMMU does not tell {self.address} from {', '.join(self.neighbours)} (group {self.group}): they "
                "can only be given away together. Put the drive into another slot"
            )
        if not self.bound:
            return f"{self.address} has the driver {self.driver or '(none)'}, not vfio-pci. " + to_vfio(self)
        return ""


def to_vfio(function: Function) -> str:
    """The commands that take the function from the kernel and give it to VFIO. Only for one that nothing uses."""
    assert not function.uses
    at = f"/sys/bus/pci/devices/{function.address}"
    holds = f" (its {', '.join(function.namespaces)} vanishes from /dev)" if function.namespaces else ""
    unbind = f"  echo {function.address} > {at}/driver/unbind\n" if function.driver else ""
    return (
        f"Be sure that nothing on it is needed{holds}, then run as root:\n"
        "  modprobe vfio-pci\n"
        f"{unbind}"
        f"  echo vfio-pci > {at}/driver_override\n"
        f"  echo {function.address} > /sys/bus/pci/drivers_probe\n"
    )


def to_kernel(address: str) -> str:
    """The commands that give the function back to the kernel's nvme driver."""
    at = f"/sys/bus/pci/devices/{address}"
    return (
        "As root:\n"
        f"  echo {address} > {at}/driver/unbind\n"
        f"  echo > {at}/driver_override\n"
        f"  echo {address} > /sys/bus/pci/drivers_probe\n"
    )


def look(address: str) -> Function:
    """The function as it is now. EngineError when there is none at this address."""
    if not _ADDRESS.fullmatch(address):
        raise EngineError(f"{address!r} is no PCI address", "Write all of it, as in 0000:01:00.0")
    at = SYS / "bus/pci/devices" / address
    if not at.exists():
        raise EngineError(f"There is no PCI device {address}", "List the drives with: lspci -D -d ::0108")
    group = _target(at / "iommu_group")
    namespaces = tuple(sorted(_namespaces(at)))
    return Function(
        address=address,
        pci_class=_text(at / "class"),
        driver=_target(at / "driver"),
        model=_model(at),
        group=group,
        neighbours=tuple(sorted(_in_the_way(at, address))) if group else (),
        namespaces=namespaces,
        uses=tuple(use for name in namespaces for use in _uses(name)),
        cdev=next((path.name for path in at.glob("vfio-dev/vfio*")), ""),
    )


def drives() -> list[Function]:
    """All NVMe controllers of the machine."""
    devices = sorted((SYS / "bus/pci/devices").glob("*"))
    return [look(path.name) for path in devices if _text(path / "class") == NVME_CLASS]


def holders(path: str) -> list[str]:
    """`1234 (python3)` for each process that has the file open, as far as this user may see."""
    found = []
    for process in PROC.glob("[0-9]*"):
        try:
            if any(os.readlink(fd) == path for fd in (process / "fd").iterdir()):
                found.append(f"{process.name} ({_text(process / 'comm')})")
        except OSError:
            continue  # of another user, or over
    return found


def _namespaces(at: Path) -> list[str]:
    """Names of the function's block devices. With native multipath they hang below the subsystem, not below it."""
    found = {path.name for path in at.glob("nvme/nvme*/nvme*n*") if (path / "size").exists()}
    for controller in at.glob("nvme/nvme*"):
        for subsystem in SYS.glob("class/nvme-subsystem/nvme-subsys*"):
            if (subsystem / controller.name).exists():
                found |= {path.name for path in subsystem.glob("nvme*n*") if (path / "size").exists()}
    return list(found)


def _uses(name: str) -> list[str]:
    """What holds a block device or one of its partitions: mounts, swap, and devices built on it (LVM, MD, LUKS)."""
    block = SYS / "class/block" / name
    parts = [block, *(path for path in block.glob(f"{name}p*") if (path / "partition").exists())]
    uses = []
    for part in parts:
        number = _text(part / "dev")
        for line in _text(PROC / "self/mountinfo").splitlines():
            fields = line.split()
            if len(fields) > 4 and (fields[2] == number or f"/dev/{part.name}" in fields):
                uses.append(f"/dev/{part.name} is mounted on {fields[4]}")
        uses += [f"/dev/{part.name} is part of {holder.name}" for holder in part.glob("holders/*")]
        if any(line.split()[:1] == [f"/dev/{part.name}"] for line in _text(PROC / "swaps").splitlines()[1:]):
            uses.append(f"/dev/{part.name} is swap space")
    return uses


def _in_the_way(at: Path, address: str) -> list[str]:
    """Other functions of the group, unless they are bridges, have no driver, or one of user space."""
    found = []
    for other in (at / "iommu_group/devices").glob("*"):
        driver = _target(other / "driver")
        if other.name != address and driver not in ("", "vfio-pci", "pcieport"):
            found.append(f"{other.name} ({driver})")
    return found


def _model(at: Path) -> str:
    names = [_text(path) for path in at.glob("nvme/nvme*/model")]
    return names[0] if names else f"{_text(at / 'vendor')}:{_text(at / 'device')}"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _target(link: Path) -> str:
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""
