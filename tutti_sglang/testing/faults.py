"""Seeded faults below an engine, like bad blocks of a drive: what happens depends on the 4 KiB blocks an I/O touches.

Which blocks are bad is a pure function of (seed, drive, block, operation), so that every engine, however it joins and
cuts transfers, meets the same drive, and `FaultPlan.expected` knows each result beforehand. The native engine
implements the same plan from `packed()`.

One system call on the bytes [start, end) of a drive meets, in this order:
STALL  a stalled block in it: the call waits until the gate opens (at most STALL_SECONDS)
LATE   a late block in it: the call takes `delay` seconds longer, once
ERROR  a failing block in it: -errno, nothing moves
then the first block of the next three kinds ends the call before it; when the call starts in that block:
SHORT  only the bytes of this block move
ZERO   nothing moves, 0 is returned
TORN   the bytes of this block are reported as moved, but stay what they were
"""

import enum
import errno
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import Batch, Operation, Results
from tutti_sglang.engine.system import SYSTEM, Iovecs, Place, Seam, head

BLOCK = 4096
STALL_SECONDS = 600.0
EVERY_BLOCK = 1 << 16
ANY_DRIVE = 0xFFFF
READS, WRITES = 1 << Operation.READ, 1 << Operation.WRITE

PACKED_DTYPE = np.dtype(
    [
        ("seed", "<u8"),
        ("begin", "<u8"),
        ("end", "<u8"),
        ("gate", "<u8"),  # address of the gate's u32 word; 0: none
        ("rates", "<u4", 6),  # of 65536 blocks, indexed by Fault - 1
        ("drive", "<u4"),
        ("operations", "<u4"),
        ("error", "<i4"),
        ("delay_us", "<u4"),
    ]
)
"""`struct tutti_faults`: 72 bytes, no padding."""


class Fault(enum.IntEnum):
    """What is wrong with a block."""

    NONE = 0
    ERROR = 1
    ZERO = 2
    SHORT = 3
    TORN = 4
    LATE = 5
    STALL = 6


class Gate:
    """What a STALL waits for: a u32 word, closed while it is 0."""

    def __init__(self) -> None:
        self.word = np.zeros(1, dtype=np.uint32)

    def open(self) -> None:
        """Let every stalled I/O go on, now and later."""
        self.word[0] = 1

    def wait(self) -> None:
        """Block until it is open, for at most STALL_SECONDS."""
        until = time.monotonic() + STALL_SECONDS
        while not self.word[0] and time.monotonic() < until:
            time.sleep(0.001)


@dataclass(frozen=True)
class FaultPlan:
    """A drive's bad blocks.

    `rates`: how many of 65536 blocks have each fault, in all at most 65536; only blocks from byte `begin` to before
    `end` of the drive's space, of `drive` and for `operations` (READS | WRITES) have any. `delay` in seconds.
    """

    rates: dict[Fault, int]
    seed: int = 0
    begin: int = 0
    end: int = 1 << 63
    drive: int = ANY_DRIVE
    operations: int = READS | WRITES
    error: int = errno.EIO
    delay: float = 0.002
    gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        assert sum(self.rates.values()) <= EVERY_BLOCK
        assert self.begin % BLOCK == self.end % BLOCK == 0

    def packed(self) -> npt.NDArray[np.void]:
        """(1,) PACKED_DTYPE, for native engines; the gate lives as long as the plan."""
        rates = [self.rates.get(fault, 0) for fault in Fault if fault]
        gate = self.gate.word.ctypes.data
        delay = round(self.delay * 1e6)
        values = (self.seed, self.begin, self.end, gate, rates, self.drive, self.operations, self.error, delay)
        return np.array([values], dtype=PACKED_DTYPE)

    def faults(self, drive: int, first: int, count: int, operation: Operation) -> npt.NDArray[np.int64]:
        """(count,) Fault of the blocks from number `first` on."""
        blocks = np.arange(first, first + count, dtype=np.uint64)
        x = np.uint64(self.seed) + (blocks * np.uint64(2) + np.uint64(operation)) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(drive * 0xD1B54A32D192ED03 % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) >> np.uint64(48)
        limits = np.cumsum([self.rates.get(fault, 0) for fault in Fault if fault])
        found = (np.searchsorted(limits, x.astype(np.int64), side="right") + 1) % len(Fault)
        inside = (blocks >= np.uint64(self.begin // BLOCK)) & (blocks < np.uint64(self.end // BLOCK))
        concerned = self.drive in (ANY_DRIVE, drive) and bool(self.operations >> operation & 1)
        return np.where(inside & concerned, found, Fault.NONE)

    def expected(self, batch: Batch) -> Results:
        """(n,) what an engine answers: -errno where an ERROR block is touched, -EIO for a ZERO block, or length."""
        results = np.empty(len(batch), dtype=np.int32)
        for i, ioctx in enumerate(batch.tolist()):
            _, offset, length, _, drive, operation, *_ = ioctx
            first, last = offset // BLOCK, (offset + length - 1) // BLOCK
            faults = self.faults(drive, first, last - first + 1, Operation(operation))
            zero = -errno.EIO if Fault.ZERO in faults else length
            results[i] = -self.error if Fault.ERROR in faults else zero
        return results


class FaultySystem:
    """A Seam with a FaultPlan in it."""

    def __init__(self, plan: FaultPlan, system: Seam = SYSTEM) -> None:
        self.plan = plan
        self._system = system

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        """As Seam.transfer, on a drive with bad blocks."""
        start = place.drive_offset
        first = start // BLOCK
        last = (start + int(iovecs[:, 1].sum()) - 1) // BLOCK
        faults = self.plan.faults(place.drive, first, last - first + 1, operation)
        if Fault.STALL in faults:
            self.plan.gate.wait()
        if Fault.LATE in faults:
            time.sleep(self.plan.delay)
        if Fault.ERROR in faults:
            return -self.plan.error
        ends = np.flatnonzero(np.isin(faults, (Fault.ZERO, Fault.SHORT, Fault.TORN)))
        if not len(ends):
            return self._system.transfer(operation, place, iovecs)
        if ends[0] > 0:
            return self._system.transfer(operation, place, head(iovecs, (first + int(ends[0])) * BLOCK - start))
        block = head(iovecs, (first + 1) * BLOCK - start)
        match Fault(int(faults[0])):
            case Fault.ZERO:
                return 0
            case Fault.TORN:
                return int(block[:, 1].sum())
            case _:
                return self._system.transfer(operation, place, block)
