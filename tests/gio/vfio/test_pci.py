"""A drive that is in use is told from one that is not, whatever uses it, and gets no commands. The real sysfs is tried
in the guest (tests/nvme/checks_pci.py); here are the uses that a guest cannot have."""

from pathlib import Path

import pytest

from tutti_sglang.errors import EngineError
from tutti_sglang.gio.vfio import pci

ADDRESS = "0000:01:00.0"


class Machine:
    """A /sys and a /proc with one drive, nvme3, and its namespace nvme3n1 of two partitions."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        self.at = self.sys / "bus/pci/devices" / ADDRESS
        self.block = self.at / "nvme/nvme3/nvme3n1"
        for folder in (self.block / "holders", self.block / "nvme3n1p2/holders", self.proc / "self"):
            folder.mkdir(parents=True)
        for path, text in (
            (self.at / "class", pci.NVME_CLASS),
            (self.at / "nvme/nvme3/model", "A drive"),
            (self.block / "size", "1000"),
            (self.block / "dev", "259:1"),
            (self.block / "nvme3n1p2/partition", "2"),
            (self.block / "nvme3n1p2/dev", "259:3"),
            (self.proc / "self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw"),
            (self.proc / "swaps", "Filename Type Size Used Priority\n"),
        ):
            path.write_text(text + "\n")
        (self.sys / "class/block").mkdir(parents=True)
        (self.sys / "class/block/nvme3n1").symlink_to(self.block)
        self.drive(self.at, "nvme")
        self.group = self.sys / "kernel/iommu_groups/7"
        (self.group / "devices").mkdir(parents=True)
        (self.at / "iommu_group").symlink_to(self.group)
        (self.group / "devices" / ADDRESS).symlink_to(self.at)

    def drive(self, function: Path, name: str) -> None:
        driver = self.sys / "bus/pci/drivers" / name
        driver.mkdir(parents=True, exist_ok=True)
        (function / "driver").unlink(missing_ok=True)
        (function / "driver").symlink_to(driver)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(pci, "SYS", made.sys)
    monkeypatch.setattr(pci, "PROC", made.proc)
    return made


def test_a_drive_that_nothing_uses_gets_its_commands(machine: Machine) -> None:
    function = pci.look(ADDRESS)
    assert (function.driver, function.group, function.namespaces) == ("nvme", "7", ("nvme3n1",))
    assert function.model == "A drive"
    assert "nvme3n1 vanishes from /dev" in function.problem()
    assert f"echo {ADDRESS} > /sys/bus/pci/devices/{ADDRESS}/driver/unbind" in function.problem()


@pytest.mark.parametrize(
    ("file", "line", "use"),
    [
        ("self/mountinfo", "30 22 259:1 / /data rw - xfs /dev/nvme3n1 rw", "/dev/nvme3n1 is mounted on /data"),
        ("self/mountinfo", "30 22 259:3 / /boot rw - ext4 /dev/nvme3n1p2 rw", "/dev/nvme3n1p2 is mounted on /boot"),
        ("self/mountinfo", "30 22 0:44 / /pool rw - btrfs /dev/nvme3n1p2 rw", "/dev/nvme3n1p2 is mounted on /pool"),
        ("swaps", "/dev/nvme3n1p2 partition 8 0 -2", "/dev/nvme3n1p2 is swap space"),
    ],
)
def test_a_drive_in_use_gets_none(machine: Machine, file: str, line: str, use: str) -> None:
    with open(machine.proc / file, "a") as text:
        text.write(line + "\n")
    problem = pci.look(ADDRESS).problem()
    assert use in problem
    assert "unbind" not in problem
    with pytest.raises(AssertionError):
        pci.to_vfio(pci.look(ADDRESS))


@pytest.mark.parametrize("place", ["nvme3n1", "nvme3n1/nvme3n1p2"])
def test_a_volume_on_it_is_a_use(machine: Machine, place: str) -> None:
    (machine.block.parent / place / "holders/dm-0").mkdir()
    problem = pci.look(ADDRESS).problem()
    assert "is part of dm-0" in problem
    assert "unbind" not in problem


def test_namespaces_of_a_shared_subsystem_are_found(machine: Machine) -> None:
    subsystem = machine.sys / "class/nvme-subsystem/nvme-subsys3"
    (subsystem / "nvme3").mkdir(parents=True)
    machine.block.rename(subsystem / "nvme3n1")
    (machine.sys / "class/block/nvme3n1").unlink()
    (machine.sys / "class/block/nvme3n1").symlink_to(subsystem / "nvme3n1")
    (subsystem / "nvme3n1/holders/md0").mkdir()
    assert "is part of md0" in pci.look(ADDRESS).problem()


def test_without_an_iommu_it_is_refused(machine: Machine) -> None:
    (machine.at / "iommu_group").unlink()
    assert "intel_iommu=on" in pci.look(ADDRESS).problem()


@pytest.mark.parametrize(("driver", "blocks"), [("nvme", True), ("pcieport", False), ("vfio-pci", False)])
def test_neighbours_with_a_driver_of_the_kernel_are_in_the_way(machine: Machine, driver: str, blocks: bool) -> None:
    other = machine.sys / "bus/pci/devices/0000:02:00.0"
    other.mkdir()
    (machine.group / "devices/0000:02:00.0").symlink_to(other)
    machine.drive(other, driver)
    assert ("0000:02:00.0" in pci.look(ADDRESS).problem()) is blocks


def test_a_bound_drive_has_no_problem(machine: Machine) -> None:
    machine.drive(machine.at, "vfio-pci")
    (machine.sys / "class/block/nvme3n1").unlink()
    for path in sorted(machine.at.glob("nvme/**/*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert pci.look(ADDRESS).problem() == ""
    assert [each.address for each in pci.drives()] == [ADDRESS]


@pytest.mark.parametrize("address", ["01:00.0", "0000:01:00.8", "nvme0", "0000:01:00.0/1", "../../etc"])
def test_what_is_no_address_is_refused(machine: Machine, address: str) -> None:
    with pytest.raises(EngineError, match="no PCI address"):
        pci.look(address)


def test_an_address_without_a_device_is_refused(machine: Machine) -> None:
    with pytest.raises(EngineError, match="no PCI device"):
        pci.look("0000:09:00.0")
