"""A root for the guest: a static busybox, the modules that it needs in load order, and an init that mounts the host."""

import gzip
import re
from pathlib import Path

MODULES = ("virtio_pci", "9pnet_virtio", "9p", "vfio_pci", "vfio_iommu_type1", "nvme", "crc32c_generic", "ext4")
"""Loaded before the script starts, each after what it depends on. `nvme` takes all drives, as on any machine."""

FOLDERS = (
    *(f"*/kernel/{name}/*" for name in ("block", "crypto", "lib", "net/9p", "virt")),
    *(f"*/kernel/drivers/{name}/*" for name in ("nvme", "vfio", "virtio")),
    *(f"*/kernel/fs/{name}/*" for name in ("9p", "ext4", "fscache", "jbd2", "netfs")),
    "*/kernel/fs/mbcache.ko",
)
"""Where those modules and what they depend on lie in the kernel's package, as patterns of tar."""

_INIT = """#!/bin/sh
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sysfs /sys; $B mount -t devtmpfs dev /dev
for m in $($B cat /modules/order); do $B insmod /modules/$m.ko || echo "insmod $m failed"; done
$B mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose root /host
$B mount -t 9p -o trans=virtio,version=9p2000.L,rw,msize=512000,cache=none work /host/mnt
$B mkdir -p /dev/shm
$B mount -t tmpfs shm /dev/shm
for d in dev proc sys; do $B mount --rbind /$d /host/$d; done
$B mount -t tmpfs run /host/run
$B chroot /host /bin/sh /mnt/start
$B sync
$B reboot -f
"""

_FOLDER, _FILE, _PROGRAM, _LINK, _CONSOLE = 0o040755, 0o100644, 0o100755, 0o120777, 0o020600


def write(kernel: Path, busybox: Path, output: Path) -> None:
    """`kernel`: an unpacked Debian linux-image; `busybox`: a static one."""
    modules = _load_order(kernel)
    entries = [(name, _FOLDER, b"") for name in ("bin", "modules", "proc", "sys", "dev", "host")]
    entries += [
        ("init", _PROGRAM, _INIT.encode()),
        ("bin/busybox", _PROGRAM, busybox.read_bytes()),
        ("bin/sh", _LINK, b"busybox"),
        ("modules/order", _FILE, "\n".join(modules).encode()),
        ("dev/console", _CONSOLE, b""),  # init's own output, before devtmpfs is there
    ]
    entries += [(f"modules/{name}.ko", _FILE, content) for name, content in modules.items()]
    archive = b"".join(_entry(number, *each) for number, each in enumerate(entries, 1))
    with gzip.open(output, "wb", compresslevel=1) as file:
        file.write(archive + _entry(0, "TRAILER!!!", 0, b""))


def _load_order(kernel: Path) -> dict[str, bytes]:
    """Module → its content, in an order in which each comes after what it depends on (`depends=` of its .modinfo)."""
    files = {path.name.partition(".")[0].replace("-", "_"): path for path in kernel.rglob("*.ko")}
    order: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in order or name not in files:  # what has no file is built in
            return
        content = files[name].read_bytes()
        depends = re.search(rb"\0depends=([^\0]*)\0", content)
        for other in depends[1].decode().split(",") if depends and depends[1] else ():
            add(other.replace("-", "_"))
        order[name] = content

    for name in MODULES:
        add(name)
    return order


def _entry(number: int, name: str, mode: int, content: bytes) -> bytes:
    """A file in the format newc of cpio. Only the console is a device, with numbers 5 and 1."""
    device = (5, 1) if mode == _CONSOLE else (0, 0)
    path = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
    return _padded(b"070701" + b"".join(b"%08X" % field for field in fields) + path) + _padded(content)


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % 4)
