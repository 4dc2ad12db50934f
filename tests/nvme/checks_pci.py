"""Giving drives to VFIO: what is said before, what is refused, and that the printed commands do it."""

import os
import subprocess

from tests.nvme.bench import Bench, bind
from tutti_sglang.gio.vfio import pci


def check_the_kernel_has_the_drives_and_it_is_said_how_to_get_them(bench: Bench) -> None:
    for address in bench.addresses.values():
        function = pci.look(address)
        assert function.driver == "nvme"
        assert function.is_nvme
        assert function.group
        assert function.namespaces
        assert f"echo {address} > /sys/bus/pci/devices/{address}/driver/unbind" in function.problem()


def check_all_controllers_are_found(bench: Bench) -> None:
    assert {each.address for each in pci.drives()} == set(bench.addresses.values())


def check_a_drive_with_a_mounted_file_system_gets_no_commands(bench: Bench) -> None:
    function = pci.look(bench.addresses["GUARD"])
    block = next(name for name in function.namespaces if name.endswith("n1"))
    os.makedirs("/run/mounted")
    subprocess.run(["mount", "-t", "ext4", "-o", "ro,noload", f"/dev/{block}", "/run/mounted"], check=True)
    try:
        problem = pci.look(function.address).problem()
        assert f"/dev/{block} is mounted on /run/mounted" in problem
        assert "unbind" not in problem
    finally:
        subprocess.run(["umount", "/run/mounted"], check=True)
    assert "unbind" in pci.look(function.address).problem()


def check_a_device_that_is_no_drive_is_refused(bench: Bench) -> None:
    others = [name for name in os.listdir("/sys/bus/pci/devices") if name not in bench.addresses.values()]
    assert others
    assert all("no NVMe controller" in pci.look(name).problem() for name in others)


def check_the_printed_commands_give_every_drive_to_vfio(bench: Bench) -> None:
    for address in bench.addresses.values():
        bind(address)
        function = pci.look(address)
        assert function.bound
        assert not function.namespaces
        assert not function.problem()


def check_the_printed_commands_give_a_drive_back_to_the_kernel(bench: Bench) -> None:
    address = bench.addresses["SLOW"]
    for line in pci.to_kernel(address).splitlines():
        if line.startswith("  "):
            assert os.system(line) == 0, line
    assert pci.look(address).driver == "nvme"
    bind(address)
