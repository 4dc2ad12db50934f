"""A machine with NVMe drives behind an IOMMU, by QEMU: its kernel, its devices, one run of a script in it.

The guest's root is the host's, read-only; /mnt is a folder of the run, with the drives' images in it. Emulation only
(no KVM): a guest that hangs under somebody's nested KVM would say nothing.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.nvme import initramfs

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tutti-sglang" / "nvme"
QEMU = "qemu-system-x86_64"
TIMEOUT = 1000
"""Seconds of a run; less than 30 on an idle machine."""

_ROOT = Path(__file__).parent.parent.parent
# no_timer_check: on a busy host the timer is late, and the kernel would give up.
_APPEND = "console=ttyS0 panic=-1 intel_iommu=on quiet mitigations=off tsc=reliable no_timer_check"


class Missing(Exception):
    """What the tests need is not to be had here; the message says what and how to get it."""


@dataclass
class Kernel:
    """What a guest boots."""

    image: Path
    initrd: Path


@dataclass
class Drive:
    """A namespace: an image in the run's folder (zeros unless it is there), and how QEMU presents it. `node`: further
    layers, as QEMU's options of a block device in which {image} stands for the file."""

    name: str
    size: int
    block: int = 512
    node: dict[str, Any] = field(default_factory=dict)


@dataclass
class Controller:
    """An NVMe controller. `options`: of QEMU's device, as mdts=5."""

    serial: str
    drives: list[Drive]
    options: str = ""


def qemu() -> str:
    """The emulator's path. Missing."""
    found = shutil.which(QEMU)
    if not found:
        raise Missing(f"{QEMU} is not installed: apt-get install --no-install-recommends qemu-system-x86")
    return found


def kernel() -> Kernel:
    """The distribution's kernel and an initramfs, made once per version and kept in CACHE. Missing."""
    package = _kernel_package()
    recipe = hashlib.sha256(Path(initramfs.__file__).read_bytes()).hexdigest()[:8]
    folder = CACHE / f"{package}-{recipe}"
    found = Kernel(folder / "vmlinuz", folder / "initrd.gz")
    if not found.initrd.exists():
        draft = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            _make_kernel(package, draft)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return found


def boot(folder: Path, controllers: list[Controller], script: str, peer_size: int = 16 << 20) -> list[dict[str, Any]]:
    """Run `script` (Python) in a guest with the controllers and with `peer_size` bytes of memory in a PCI device's BAR,
    to which drives can write as to a GPU's. What it appended to /mnt/results, a JSON object per line. The drives'
    images stay in `folder`. Missing; AssertionError with the guest's last words when it did not end by itself."""
    emulator, boots = qemu(), kernel()
    for controller in controllers:
        for drive in controller.drives:
            image = folder / f"{drive.name}.img"
            if not image.exists():
                with open(image, "wb") as file:
                    file.truncate(drive.size)
    with open(folder / "peer.img", "wb") as peer:
        peer.truncate(peer_size)
    (folder / "script.py").write_text(script)
    environment = f"PYTHONPATH={_ROOT} PYTHONDONTWRITEBYTECODE=1 TMPDIR=/run HOME=/run"
    (folder / "start").write_text(
        f"export {environment} PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
        f"cd /run\n{sys.executable} -X faulthandler /mnt/script.py > /mnt/output 2>&1\necho $? > /mnt/rc\n"
    )
    command = [emulator, *_arguments(folder, boots, controllers, peer_size)]
    with open(folder / "qemu.log", "wb") as log:
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the guest did not end within {TIMEOUT} s\n{_last_words(folder)}") from None
    status = folder / "rc"
    assert status.exists(), f"the guest's script did not end\n{_last_words(folder)}"
    assert status.read_text().strip() == "0", f"the guest's script failed\n{_last_words(folder)}"
    return [json.loads(line) for line in (folder / "results").read_text().splitlines()]


# QEMU 7.2 emulates AVX2's gathers wrongly: numpy's argsort dies in them now and then.
_PROCESSOR = "max,avx2=off"


def _arguments(folder: Path, boots: Kernel, controllers: list[Controller], peer_size: int) -> list[str]:
    arguments = [
        *("-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", f"file:{folder}/serial"),
        *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", _PROCESSOR, "-smp", "2", "-m", "1024"),
        *("-device", "intel-iommu,intremap=on,caching-mode=on"),
        *("-kernel", str(boots.image), "-initrd", str(boots.initrd), "-append", _APPEND),
        *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root"),
        *("-fsdev", f"local,id=work,path={folder},security_model=none"),
        *("-device", "virtio-9p-pci,fsdev=work,mount_tag=work"),
        *("-object", f"memory-backend-file,id=peer,mem-path={folder}/peer.img,size={peer_size},share=on"),
        *("-device", "ivshmem-plain,memdev=peer"),
        *("-object", "throttle-group,id=slow,x-iops-total=4"),
    ]
    for number, controller in enumerate(controllers):
        arguments += ["-device", f"nvme,id=nvme{number},serial={controller.serial},{controller.options}".strip(",")]
        for nsid, drive in enumerate(controller.drives, 1):
            file = {"driver": "file", "filename": f"{folder}/{drive.name}.img"}
            node = {"driver": "raw", "file": file}
            if drive.node:
                node = json.loads(json.dumps(drive.node).replace('"{image}"', json.dumps(file)))
            arguments += ["-blockdev", json.dumps(node | {"node-name": drive.name})]
            sizes = f"logical_block_size={drive.block},physical_block_size={drive.block}"
            arguments += ["-device", f"nvme-ns,drive={drive.name},bus=nvme{number},nsid={nsid},{sizes}"]
    return arguments


def _last_words(folder: Path) -> str:
    texts = [folder / name for name in ("serial", "qemu.log", "output")]
    return "\n".join(path.read_text(errors="replace")[-6000:] for path in texts if path.exists())


def _kernel_package() -> str:
    """The package behind linux-image-amd64; without apt, the newest kernel in CACHE. Missing."""
    if shutil.which("apt-cache"):
        words = _run("apt-cache", "depends", "linux-image-amd64").split()
        found = [word for word in words if word.startswith("linux-image-") and word != "linux-image-amd64"]
        if found:
            return found[0]
    kept = sorted(CACHE.glob("linux-image-*/initrd.gz"), key=lambda path: path.stat().st_mtime)
    if kept:
        return kept[-1].parent.name.rpartition("-")[0]
    raise Missing("no package linux-image-amd64 is known here (apt-get update?), and the guest needs its kernel")


def _make_kernel(package: str, folder: Path) -> None:
    try:
        _run("apt-get", "download", package, "busybox-static", cwd=folder)
    except subprocess.SubprocessError as error:
        raise Missing(f"{package} cannot be downloaded: {error}") from error
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    for deb, patterns in (
        (f"{package}_*.deb", ["./boot/*", *initramfs.FOLDERS]),
        ("busybox-static_*.deb", ["*/busybox"]),
    ):
        (file,) = folder.glob(deb)
        wanted = " ".join(f"'{pattern}'" for pattern in patterns)
        _run("sh", "-ec", f"dpkg-deb --fsys-tarfile {file} | tar -x -C {unpacked} --wildcards {wanted}")
        file.unlink()
    initramfs.write(unpacked, unpacked / "bin/busybox", folder / "initrd.gz")
    (image,) = (unpacked / "boot").glob("vmlinuz-*")
    shutil.copy(image, folder / "vmlinuz")
    shutil.rmtree(unpacked)


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
