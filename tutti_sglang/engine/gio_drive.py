"""One drive of the gio engine: its ring, mover and controller, and what waits for an IOCB."""

import ctypes
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IN_PROGRESS, Batch, IoClass, Results, Ticket
from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import Service, SoftwareController
from tutti_sglang.gio.queues import DriveQueues, HostMemory, Limits, QueuePairs, map_region
from tutti_sglang.gio.rings import FOREVER_NS, PATIENT, IocbRing
from tutti_sglang.gio.twin import Bell, Twin

_DEPTH = 32  # IOCBs per drive; more than that waits in Python
_USER_SPACE = 1 << 47  # bytes: all addresses of a process
_BUS = 1 << 50  # where a controller finds address 0: an address that was never translated is refused

Indices = npt.NDArray[np.int64]


class Options(NamedTuple):
    """What all drives of an engine have in common; see GioEngine."""

    segment_size: int
    depth: int
    max_io: int
    block: int
    plan: npt.NDArray[np.void] | None

    @property
    def limits(self) -> Limits:
        """What a drive of the engine says of itself."""
        shift = self.block.bit_length() - 1
        return Limits(blocks=1 << (62 - shift), block_shift=shift, mdts=self.max_io)


class GioJob(Ticket):
    """A batch on its way. Its engine's lock guards it."""

    def __init__(self, batch: Batch, deadline: float, hold: Any) -> None:
        super().__init__(batch)
        self.deadline, self.hold = deadline, hold
        self.results: Results = np.full(len(batch), IN_PROGRESS, dtype=np.int32)
        self.pending = len(batch)
        self.done = threading.Event()

    def settle(self, indices: Indices, results: Results | int) -> None:
        """These IOCTX have ended; each ends once."""
        self.results[indices] = results
        self.pending -= len(indices)


class Part(NamedTuple):
    """The IOCTX of a job that share an IOCB."""

    job: GioJob
    indices: Indices


class GioDrive:
    """One drive: its ring, mover and controller, and what waits for an IOCB."""

    def __init__(self, native: ctypes.CDLL, bell: Bell, options: Options, number: int) -> None:
        """Starts its threads. `bell`: rung when IOCBs are complete."""
        limits = options.limits
        self.memory = HostMemory()
        pairs = QueuePairs(self.memory, 1, options.depth.bit_length())
        everything = map_region(0, _USER_SPACE, _BUS)
        self.ring = IocbRing(_DEPTH, self.memory, [DriveQueues(limits, pairs)], everything)
        self.controller = SoftwareController(
            native, limits, pairs, options.segment_size, Service(workers=options.depth)
        )
        self.controller.map(everything)
        if options.plan is not None:
            self.controller.set_bad_blocks(options.plan, number)
        self.twin = Twin(native, self.ring, [self.controller], bell, window=options.depth)
        self.controller.start()
        self.segments: list[int] = []  # that have a file
        self.waiting: tuple[deque[Part], ...] = tuple(deque() for _ in IoClass)
        self.issued: dict[int, Part] = {}

    def push(self, job: GioJob, indices: Indices, klass: IoClass) -> None:
        """Queue IOCTX of `job`."""
        for part in self.ring.split(self._contexts(job, indices)):
            self.waiting[klass].append(Part(job, indices[part]))

    def pump(self) -> None:
        """Issue what there are IOCBs for; a class leaves one to each class above it."""
        for klass, parts in enumerate(self.waiting):
            while parts and len(self.issued) < _DEPTH - klass:
                part = parts.popleft()
                reserved = self.ring.get_iocb(1)
                assert reserved is not None
                iocb = int(reserved[0])
                self.ring.fill(iocb, self._contexts(*part), PATIENT)
                self.issued[iocb] = part
                self.twin.issue(iocb, klass, int(min(max(part.job.deadline, 0) * 1e9, FOREVER_NS)))

    def harvest(self) -> list[GioJob]:
        """Settle what is complete. Returns the jobs that gained by it."""
        ids = np.fromiter(self.issued, dtype=np.int64)
        complete = ids[self.ring.complete(ids)]
        gained = []
        for iocb in complete.tolist():
            job, indices = self.issued.pop(iocb)
            job.settle(indices, self.outcome(iocb))
            gained.append(job)
        self.ring.release(complete)
        return gained

    def drop(self, error: int, job: GioJob | None = None, segment: tuple[int, int] | None = None) -> list[GioJob]:
        """End with -`error` what waits for an IOCB, of one job, or of a segment (number, size), or all."""
        dropped = []
        for parts in self.waiting:
            kept = []
            for part in parts:
                gone = np.full(len(part.indices), job in (None, part.job))
                if segment:
                    gone &= part.job.batch["offset"][part.indices] // np.uint64(segment[1]) == segment[0]
                if gone.any():
                    part.job.settle(part.indices[gone], -error)
                    dropped.append(part.job)
                if not gone.all():
                    kept.append(part._replace(indices=part.indices[~gone]))
            parts.clear()
            parts.extend(kept)
        return dropped

    def outcome(self, iocb: int) -> Results:
        """(n,) results of an IOCB as they are now, with the errnos that NVMe has no status for."""
        results, status = self.ring.results(iocb), self.ring.status(iocb)
        host = (status & 0x8700) == abi.Status.VENDOR_ERRNO
        return np.where(host & (results != IN_PROGRESS), -(status & 0xFF).astype(np.int32), results).astype(np.int32)

    def close(self, timeout: float) -> bool:
        """Stop controller and twin."""
        return self.controller.close(timeout) and self.twin.close(timeout)

    @staticmethod
    def _contexts(job: GioJob, indices: Indices) -> Batch:
        contexts = job.batch[indices]
        contexts["drive"] = 0  # the only one of this ring
        return contexts
