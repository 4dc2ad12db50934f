"""A ring, queue pairs and a software controller over files of known content, for tests and figures of any mover."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import Service, SoftwareController
from tutti_sglang.gio.queues import DriveQueues, Limits, Memory, QueuePairs, map_region, prp_table
from tutti_sglang.gio.rings import BOUNDED, Batch, Budget, IocbRing, Lists

SEGMENTS = 2
TWO_WORKERS = Service()
BUS = 1 << 50
"""What bus addresses add to those of the mover: a controller that is given an untranslated address refuses it."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a rig; bytes where nothing else is said."""

    depth: int = 4  # IOCBs
    pairs: int = 2
    log_entries: int = 5
    block_shift: int = 9
    mdts: int = 64 << 10
    sgl: bool = True
    segment: int = 1 << 20
    memory: int = 4 << 20
    first_block: int = 0  # where the store's blocks begin; whole segments


SHAPES = {
    "SGL": Shape(),
    "PRP": Shape(sgl=False),
    "PRP without lists": Shape(sgl=False, mdts=8192),
    "PRP lists of 256": Shape(sgl=False, mdts=1 << 20, segment=4 << 20, memory=16 << 20),
    "blocks of 4 KiB": Shape(block_shift=12),
    "an LBA range": Shape(first_block=4096),
    "a command per block": Shape(mdts=512),
    "one slot": Shape(mdts=4096, pairs=1, log_entries=1),
}
"""Every way that a mover can be asked to go."""


class GioRig:
    """One drive of SEGMENTS files. `memory.view` is the data region; `content` what the files hold at first."""

    def __init__(
        self, folder: Path, native: ctypes.CDLL, memory: Memory, shape: Shape, service: Service = TWO_WORKERS
    ) -> None:
        self.shape, self.native = shape, native
        rng = np.random.default_rng(0)
        self.content = rng.integers(256, size=SEGMENTS * shape.segment, dtype=np.uint8)
        self.paths = [folder / f"{number}.seg" for number in range(SEGMENTS)]
        for number, path in enumerate(self.paths):
            path.write_bytes(self.content[number * shape.segment : (number + 1) * shape.segment].tobytes())
        self.fds = [os.open(path, os.O_RDWR) for path in self.paths]

        self.region = memory.shared(shape.memory)
        table = prp_table(self.region.address + BUS, shape.memory)
        lists = memory.shared(table.nbytes)
        lists.view[: table.nbytes] = table.view(np.uint8).ravel()
        data = map_region(self.region.address, shape.memory, self.region.address + BUS, lists.address + BUS)
        sgls = memory.shared(Lists.size(shape.depth))
        tables = [map_region(each.address, each.size, each.address + BUS) for each in (lists, sgls)]
        self.regions = np.concatenate([data, *tables])

        blocks = SEGMENTS * shape.segment >> shape.block_shift
        self.limits = Limits(blocks, shape.first_block, 1, shape.block_shift, shape.mdts, shape.sgl)
        self.pairs = QueuePairs(memory, shape.pairs, shape.log_entries)
        drives, its_lists = [DriveQueues(self.limits, self.pairs)], Lists(sgls.address, sgls.address + BUS)
        self.ring = IocbRing(shape.depth, memory, drives, self.regions[:1], its_lists)
        self.controller = SoftwareController(native, self.limits, self.pairs, shape.segment, service)
        for i in range(len(self.regions)):
            self.controller.map(self.regions[i : i + 1])
        first = (shape.first_block << shape.block_shift) // shape.segment
        for number, fd in enumerate(self.fds):
            self.controller.attach(first + number, fd)
        self.controller.start()

    def batch(self, offsets: Any, lengths: Any = 4096, operation: Any = 0, places: Any = None) -> Batch:
        """IOCTX at `offsets`; each argument one value or an array. `places`: where in the data region each lies, by
        default one after the other."""
        offsets = np.asarray(offsets, dtype=np.uint64)
        batch = np.zeros(len(offsets), dtype=abi.IOCTX_DTYPE)
        batch["offset"], batch["length"], batch["operation"] = offsets, lengths, operation
        if places is None:
            places = np.cumsum(batch["length"].astype(np.uint64)) - batch["length"]
        batch["address"] = np.asarray(places, dtype=np.uint64) + np.uint64(self.region.address)
        return batch

    def random_batch(self, rng: np.random.Generator, *, alignment: int, operation: int = 0) -> Batch:
        """At most 12 disjoint IOCTX of 1 block to 3 MDTS, in random order, at memory addresses that are multiples of
        `alignment` bytes."""
        block = 1 << self.shape.block_shift
        longest = min(3 * self.shape.mdts, self.shape.segment // 3)
        lengths = rng.integers(1, longest // block, size=(SEGMENTS, 6)) * block
        starts = np.cumsum(lengths, axis=1) - lengths
        inside = (starts + lengths <= self.shape.segment).ravel()
        offsets = (starts + np.arange(SEGMENTS)[:, None] * self.shape.segment).ravel()
        sizes = lengths.ravel()
        places = (np.cumsum(sizes + 4096) - sizes) // alignment * alignment
        inside &= places + sizes <= self.shape.memory
        chosen = rng.permutation(np.flatnonzero(inside))
        return self.batch(offsets[chosen], sizes[chosen], operation, places[chosen])

    def issue(
        self, batch: Batch, budget: Budget = BOUNDED, sms: int = 0, *, joined: bool = False
    ) -> npt.NDArray[np.int64]:
        """Fill as many IOCBs as the batch takes, and issue them together; `joined`: what lies side by side in a file is
        one command. Returns their ids."""
        files = batch["offset"] // np.uint64(self.shape.segment)
        parts = self.ring.split(batch)
        ids = self.ring.get_iocb(len(parts))
        assert ids is not None
        for iocb, part in zip(ids.tolist(), parts, strict=True):
            self.ring.fill(iocb, batch[part], budget, files[part] if joined else None)
        self.ring.issue_io(ids, sms)
        return ids

    def run(self, batch: Batch, timeout: float = 60.0, sms: int = 0, *, joined: bool = False) -> npt.NDArray[np.int32]:
        """Issue, wait for the end, give the IOCBs back. (n,) results."""
        ids = self.issue(batch, sms=sms, joined=joined)
        assert self.ring.wait_cqe(ids, timeout).all()
        results = np.concatenate([self.ring.results(iocb) for iocb in ids.tolist()])
        self.ring.release(ids)
        return results

    def in_memory(self, batch: Batch, i: int) -> npt.NDArray[np.uint8]:
        """The memory of IOCTX `i`."""
        start = int(batch["address"][i]) - self.region.address
        return self.region.view[start : start + int(batch["length"][i])]

    def expected(self, batch: Batch, i: int) -> npt.NDArray[np.uint8]:
        """What the files held at first where IOCTX `i` lies."""
        return self.content[int(batch["offset"][i]) :][: int(batch["length"][i])]

    def on_disk(self) -> npt.NDArray[np.uint8]:
        """What the files hold now."""
        return np.concatenate([np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in self.paths])

    def close(self) -> None:
        """Stop the controller and close the files; the mover must have ended, or be closed after this."""
        assert self.controller.close(60.0)
        for fd in self.fds:
            os.close(fd)
