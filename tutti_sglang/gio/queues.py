"""Queue pairs, drives and mapped memory, laid out for a mover: everything behind the Context that a kernel is given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tutti_sglang.gio import abi
from tutti_sglang.memory import Region, view
from tutti_sglang.units import align_up

_LINE = 64  # bytes that one doorbell has for itself, so that no two share a cache line
_MAX_BLOCKS = 1 << 16  # of one command: NLB has 16 bits


class Shared(Protocol):
    """Memory of which the host has a `view`, and the mover the `address`."""

    @property
    def address(self) -> int: ...

    @property
    def view(self) -> npt.NDArray[np.uint8]: ...


class Memory(Protocol):
    """Where a mover's memory comes from."""

    def shared(self, size: int) -> Region:
        """Zeroed bytes that host, mover and controller all see under one address."""

    def iocbs(self, size: int) -> Shared:
        """Zeroed bytes for what the host writes and the mover reads: near the mover, if that can be had."""

    def flush(self) -> None:
        """Let what the host wrote there arrive before the mover is started."""

    def local(self, size: int) -> int:
        """The address of zeroed bytes that only the mover touches."""

    def constant(self, content: npt.NDArray[np.void]) -> int:
        """The address of a copy of `content` that the mover may only read."""


class HostMemory:
    """Memory for movers that are CPU threads: all of it is the host's, and lives as long as this object."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def shared(self, size: int) -> Region:
        """As Memory.shared."""
        self._regions.append(Region(size))
        return self._regions[-1]

    def iocbs(self, size: int) -> Region:
        """As Memory.iocbs."""
        return self.shared(size)

    def flush(self) -> None:
        """As Memory.flush; there is nothing to do."""

    def local(self, size: int) -> int:
        """As Memory.local."""
        return self.shared(size).address

    def constant(self, content: npt.NDArray[np.void]) -> int:
        """As Memory.constant."""
        region = self.shared(max(1, content.nbytes))
        region.view[: content.nbytes] = np.frombuffer(content.tobytes(), dtype=np.uint8)
        return region.address


@dataclass(frozen=True)
class Limits:
    """What Identify says of a drive, and which of its blocks are the store's. `mdts` in bytes, 0 = no limit."""

    blocks: int
    first_block: int = 0
    nsid: int = 1
    block_shift: int = 9
    mdts: int = 128 << 10
    sgl: bool = True

    @property
    def transfer(self) -> int:
        """Bytes that one command moves at most: MDTS, 65536 blocks, and without SGL what a PRP list of ours reaches."""
        bound = min(_MAX_BLOCKS << self.block_shift, self.mdts or 1 << 30)
        return bound if self.sgl else min(bound, abi.PRP_MDTS)


class QueuePairs:
    """`count` queue pairs of 2**log_entries entries: rings and doorbells in shared memory, states in the mover's own.

    `table`: (count,) PAIR_DTYPE. Doorbells are words in memory: a software controller reads them, or a relay copies
    them; `table` may be given addresses of real registers instead.
    """

    def __init__(self, memory: Memory, count: int, log_entries: int) -> None:
        entries = 1 << log_entries
        assert log_entries >= 1
        assert entries <= abi.QUEUE_ENTRIES
        sq_size = align_up(entries * abi.SQE_DTYPE.itemsize, abi.PAGE)  # a ring starts on a page of the controller
        cq_size = align_up(entries * abi.CQE_DTYPE.itemsize, abi.PAGE)
        self.sq = memory.shared(count * sq_size)
        self.cq = memory.shared(count * cq_size)
        self.doorbells = memory.shared(count * 2 * _LINE)
        states = memory.local(count * abi.STATE_DTYPE.itemsize)
        each = np.arange(count, dtype=np.uint64)
        self.table = np.zeros(count, dtype=abi.PAIR_DTYPE)
        self.table["sq"] = self.sq.address + each * np.uint64(sq_size)
        self.table["cq"] = self.cq.address + each * np.uint64(cq_size)
        self.table["sq_doorbell"] = self.doorbells.address + each * np.uint64(2 * _LINE)
        self.table["cq_doorbell"] = self.table["sq_doorbell"] + np.uint64(_LINE)
        self.table["state"] = states + each * np.uint64(abi.STATE_DTYPE.itemsize)
        self.table["log_entries"] = log_entries

    def states(self) -> npt.NDArray[np.void]:
        """(count,) STATE_DTYPE as it is now; for movers whose local memory is the host's."""
        return view(int(self.table["state"][0]), len(self.table) * abi.STATE_DTYPE.itemsize).view(abi.STATE_DTYPE)


@dataclass
class DriveQueues:
    """One drive of a context: what it can do, and its queue pairs."""

    limits: Limits
    pairs: QueuePairs
    address: int = field(default=0, init=False)
    """Of the pairs' table in the mover's memory, once the context is built."""


def prp_table(bus: int, size: int) -> npt.NDArray[np.uint64]:
    """The PRP lists of every run of pages in a region: (ceil(pages / 256), 512) bus addresses, 0 past its end.

    Row p lists the 512 pages from page 256 p on. So a list of up to 256 pages that starts at page i is in row i // 256
    whole, and never reaches the row's last entry, which would have to point to a further list (NVMe base
    specification 2.0, §4.1.1). It costs 16 bytes per 4 KiB and is made once.
    """
    assert bus % abi.PAGE == 0
    pages = -(-size // abi.PAGE)
    rows = -(-pages // abi.PRP_WINDOW)
    page = np.arange(rows, dtype=np.uint64)[:, None] * np.uint64(abi.PRP_WINDOW) + np.arange(512, dtype=np.uint64)
    return np.where(page < pages, np.uint64(bus) + page * np.uint64(abi.PAGE), np.uint64(0))


def map_region(address: int, size: int, bus: int, prp: int = 0) -> npt.NDArray[np.void]:
    """(1,) REGION_DTYPE: `size` bytes at `address` of the mover are at `bus` for controllers. `prp`: bus address of its
    `prp_table`, 0 where all drives take SGLs."""
    return np.array([(address, size, bus, prp)], dtype=abi.REGION_DTYPE)


def build_drives(memory: Memory, drives: Sequence[DriveQueues]) -> npt.NDArray[np.void]:
    """(n,) DRIVE_DTYPE, the queue pair tables put into the mover's memory."""
    table = np.zeros(len(drives), dtype=abi.DRIVE_DTYPE)
    for row, drive in zip(table, drives, strict=True):
        drive.address = memory.constant(drive.pairs.table)
        limits = drive.limits
        row["queues"], row["queue_count"] = drive.address, len(drive.pairs.table)
        row["first_block"], row["blocks"], row["nsid"] = limits.first_block, limits.blocks, limits.nsid
        row["mdts"], row["block_shift"], row["sgl"] = limits.transfer, limits.block_shift, limits.sgl
    return table
