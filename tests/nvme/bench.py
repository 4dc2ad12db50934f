"""What checks in the guest stand on: its drives by serial number, and a mover over one of them. They are plain
functions with asserts: importing pytest in an emulated machine takes longer than all of them."""

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_sglang.config import RawName
from tutti_sglang.engine.batch import IOCTX_DTYPE, Operation
from tutti_sglang.gio.queues import DriveQueues, HostMemory, Memory
from tutti_sglang.gio.relay import Relay
from tutti_sglang.gio.rings import BOUNDED, Budget, IocbRing, Lists
from tutti_sglang.gio.twin import Bell, Pace, Twin
from tutti_sglang.gio.vfio import ioctls, pci
from tutti_sglang.gio.vfio.device import Device
from tutti_sglang.gio.vfio.drive import VfioDrive
from tutti_sglang.gio.vfio.iommu import AddressSpace, address_space
from tutti_sglang.kernels import gio_native
from tutti_sglang.memory import view
from tutti_sglang.units import align_up

WORK = Path("/mnt")
PATIENCE = 20.0
IOCBS = 8


class Bench:
    """The guest's drives. `addresses`: serial number → PCI address, found while the kernel still has them."""

    def __init__(self) -> None:
        native = gio_native.library()
        assert native is not None
        self.native = native
        self.opened: list[VfioDrive] = []
        self.stores: list[Any] = []
        functions = [each for each in Path("/sys/bus/pci/devices").glob("*") if _class(each) == pci.NVME_CLASS]
        until = time.monotonic() + PATIENCE
        while not all(list(each.glob("nvme/nvme*/nvme*n1")) for each in functions):  # the kernel probes them by and by
            assert time.monotonic() < until, "the kernel does not find the drives"
            time.sleep(0.01)
        self.addresses = {next(each.glob("nvme/nvme*/serial")).read_text().strip(): each.name for each in functions}
        self.random = np.random.default_rng(os.getpid())

    def open(self, serial: str, nsid: int = 1, *, sgl: bool = True, space: AddressSpace | None = None) -> VfioDrive:
        self.opened.append(VfioDrive(space or address_space(), RawName(self.addresses[serial], nsid), sgl=sgl))
        return self.opened[-1]

    def clean(self) -> None:
        """Close what a check that failed has left open."""
        for left in (*self.stores, *self.opened):
            left.close()
        self.stores.clear()
        self.opened.clear()

    def image(self, name: str, offset: int, size: int) -> bytes:
        """What the drive's image on the host holds now."""
        with open(WORK / f"{name}.img", "rb") as file:
            return os.pread(file.fileno(), size, offset)

    def bytes(self, size: int) -> npt.NDArray[np.uint8]:
        return self.random.integers(256, size=size, dtype=np.uint8)


class Peer(Device):
    """Another PCI device in a drive's address space, whose memory (BAR 2) stands for a GPU's."""

    def __init__(self, space: AddressSpace) -> None:
        devices = Path("/sys/bus/pci/devices").glob("*")
        (self.address,) = [path.name for path in devices if _class(path).startswith("0x0500")]
        bind(self.address)
        self.space, self.fd = space, space.way.open(pci.look(self.address))
        self._config = int(self._region(ioctls.VFIO_PCI_CONFIG_REGION_INDEX).offset)
        self._set_command(1 << 1, 0)
        self.memory = self.bar(2)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


@dataclass
class Part:
    """Memory that a mover may share with a drive."""

    address: int
    size: int

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return view(self.address, self.size)


class PeerMemory(HostMemory):
    """What mover and drive share lies in the peer's BAR; it begins as random bytes, as HBM does."""

    def __init__(self, bench: "Bench", peer: Peer) -> None:
        super().__init__()
        self.peer, self.used = peer, 0
        view(peer.memory.address, peer.memory.size)[:] = bench.bytes(peer.memory.size)

    def shared(self, size: int) -> Any:
        part = Part(self.peer.memory.address + self.used, align_up(size, 4096))
        self.used += part.size
        assert self.used <= self.peer.memory.size
        part.view[:] = 0
        return part


class Mover:
    """IOCBs over one drive: `pairs` queue pairs, one region of `size` bytes mapped, the CPU twin, a relay if asked."""

    def __init__(
        self,
        bench: Bench,
        drive: VfioDrive,
        *,
        pairs: int = 1,
        log_entries: int = 5,
        size: int = 4 << 20,
        relay: bool = False,
        max_io: int = 1 << 20,
        memory: Memory | None = None,
        start: int = 0,
    ) -> None:
        self.bench, self.drive = bench, drive
        self.memory = memory or HostMemory()
        self.region = self.memory.shared(size)
        self.pairs = drive.create_pairs(self.memory, pairs, log_entries, direct=not relay)
        self.relay = Relay(bench.native, self.pairs, drive.doorbells()) if relay else None
        self.limits = drive.limits(start, max_io)
        sgls = self.memory.shared(Lists.size(IOCBS))
        lists = Lists(sgls.address, drive.controller.map(sgls))
        regions = drive.map(self.region, self.memory)
        self.ring = IocbRing(IOCBS, self.memory, [DriveQueues(self.limits, self.pairs)], regions, lists)
        self.bell = Bell(bench.native)
        self.start_twin()

    def start_twin(self) -> None:
        endpoints = [self.relay] if self.relay else []
        self.twin = Twin(self.bench.native, self.ring, endpoints, self.bell, Pace(window=64, poll_seconds=50e-6))

    def batch(self, offsets: Any, lengths: Any, operation: Operation, places: Any = None) -> npt.NDArray[np.void]:
        offsets = np.asarray(offsets, dtype=np.uint64)
        batch = np.zeros(len(offsets), dtype=IOCTX_DTYPE)
        batch["offset"], batch["length"], batch["operation"] = offsets, lengths, operation
        if places is None:
            places = np.cumsum(batch["length"].astype(np.uint64)) - batch["length"]
        batch["address"] = np.asarray(places, dtype=np.uint64) + np.uint64(self.region.address)
        return batch

    def start(
        self, batch: npt.NDArray[np.void], budget: Budget = BOUNDED, *, joined: bool = False
    ) -> npt.NDArray[np.int64]:
        ids = self.ring.get_iocb(1)
        assert ids is not None
        pieces = self.ring.fill(int(ids[0]), batch, budget, np.zeros(len(batch), dtype=np.int64) if joined else None)
        self.commands = pieces
        self.ring.issue_io(ids)
        return ids

    def finish(self, ids: npt.NDArray[np.int64]) -> list[int]:
        assert self.ring.wait_cqe(ids, PATIENCE).all(), "no completion"
        results = self.ring.results(int(ids[0])).tolist()
        self.status = self.ring.status(int(ids[0])).tolist()
        self.ring.release(ids)
        return [int(result) for result in results]

    def run(self, batch: npt.NDArray[np.void], *, joined: bool = False) -> list[int]:
        return self.finish(self.start(batch, joined=joined))

    def close(self) -> None:
        assert self.twin.close(PATIENCE)
        if self.relay:
            self.relay.close()
        self.bell.close()


@contextlib.contextmanager
def mover(bench: Bench, serial: str, nsid: int = 1, *, sgl: bool = True, **options: Any) -> Iterator[Mover]:
    """A mover over a drive that is opened for it and closed after it."""
    drive = bench.open(serial, nsid, sgl=sgl)
    try:
        made = Mover(bench, drive, **options)
        try:
            yield made
        finally:
            made.close()
    finally:
        drive.close()


def bind(address: str) -> None:
    """Give a function to VFIO by the commands that the product prints."""
    for line in pci.to_vfio(pci.look(address)).splitlines():
        if line.startswith("  ") and "modprobe" not in line:  # loaded already
            assert os.system(line) == 0, line


def faults() -> list[str]:
    """What the IOMMU refused since the last call, from the kernel's log. QEMU answers such commands with success."""
    with open("/dev/kmsg", "rb") as log:
        os.set_blocking(log.fileno(), False)
        lines = []
        with contextlib.suppress(BlockingIOError):
            while line := os.read(log.fileno(), 8192):
                lines.append(line.decode(errors="replace"))
    found = [line for line in lines if "DMAR" in line and "fault" in line.lower()]
    new = found[faults.seen :]  # type: ignore[attr-defined]
    faults.seen = len(found)  # type: ignore[attr-defined]
    return new


faults.seen = 0  # type: ignore[attr-defined]


def run(modules: Sequence[ModuleType]) -> None:
    """Every check of the modules, in order; its outcome goes to the host at once."""
    bench = Bench()
    with open(WORK / "results", "a", buffering=1) as results:
        for module in modules:
            for name, check in checks(module):
                begin, detail = time.monotonic(), ""
                try:
                    check(bench)
                    if strange := faults():
                        detail = f"the IOMMU refused something: {strange}"
                except BaseException:
                    detail = traceback.format_exc()
                bench.clean()
                seconds = round(time.monotonic() - begin, 2)
                results.write(json.dumps({"name": name, "detail": detail, "seconds": seconds}) + "\n")


def _class(function: Path) -> str:
    return (function / "class").read_text().strip()


def checks(module: ModuleType) -> list[tuple[str, Callable[[Bench], None]]]:
    """The functions check_… of a module, in the order of its text."""
    return [(name, value) for name, value in vars(module).items() if name.startswith("check_")]
