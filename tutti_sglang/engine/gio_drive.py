"""One drive of the gio engine: its ring, mover and controller, and what waits for an IOCB."""

import ctypes
import errno
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IN_PROGRESS, Batch, IoClass, Results, Ticket
from tutti_sglang.engine.gio_backend import Backend, SoftwareBackend
from tutti_sglang.errors import EngineError
from tutti_sglang.gio import abi
from tutti_sglang.gio.queues import DriveQueues, Memory
from tutti_sglang.gio.rings import FOREVER_NS, PATIENT, IocbRing, Lists
from tutti_sglang.gio.twin import Bell, Twin

_DEPTH = 32  # IOCBs per drive; more than that waits in Python
_STOP_SECONDS = 10.0  # for threads that have nothing left to do

Indices = npt.NDArray[np.int64]


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
    """The IOCTX of a job that share an IOCB; `since` when it is issued (time.monotonic())."""

    job: GioJob
    indices: Indices
    since: float = 0.0


class GioDrive:
    """One drive: its ring, its mover and what is behind its queue pairs, and what waits for an IOCB. Its engine's lock
    guards it, but for `halt` and `revive`, which take their time."""

    def __init__(self, native: ctypes.CDLL, bell: Bell, memory: Memory, backend: Backend) -> None:
        """Starts its threads. `bell`: rung when IOCBs are complete; `memory`: that of `backend`."""
        self._native, self._bell, self.memory, self.backend = native, bell, memory, backend
        memory_of_lists = memory.shared(Lists.size(_DEPTH))
        lists = Lists(memory_of_lists.address, backend.map(memory_of_lists))
        self.ring = IocbRing(_DEPTH, memory, [DriveQueues(backend.limits, backend.pairs)], backend.regions, lists)
        self.twin = self._make_twin()
        backend.start()
        self.segments: list[int] = []  # that have a file
        self.waiting: tuple[deque[Part], ...] = tuple(deque() for _ in IoClass)
        self.issued: dict[int, Part] = {}
        self.paused = self.dead = False

    def push(self, job: GioJob, indices: Indices, klass: IoClass) -> None:
        """Queue IOCTX of `job`; those of a dead drive end at once."""
        if self.dead:
            return job.settle(indices, -errno.EIO)
        for part in self.ring.split(self._contexts(job, indices)):
            self.waiting[klass].append(Part(job, indices[part]))

    def pump(self) -> None:
        """Issue what there are IOCBs for; a class leaves one to each class above it."""
        if self.paused:
            return
        for klass, parts in enumerate(self.waiting):
            while parts and len(self.issued) < _DEPTH - klass:
                part = parts.popleft()
                reserved = self.ring.get_iocb(1)
                assert reserved is not None
                iocb = int(reserved[0])
                contexts = self._contexts(part.job, part.indices)
                segments = contexts["offset"] // np.uint64(self.backend.segment_size)  # a command stays in one
                self.backend.translate(contexts)
                self.ring.fill(iocb, contexts, PATIENT, segments)
                self.issued[iocb] = part._replace(since=time.monotonic())
                self.twin.issue(iocb, klass, int(min(max(part.job.deadline, 0) * 1e9, FOREVER_NS)))

    def harvest(self) -> list[GioJob]:
        """Settle what is complete. Returns the jobs that gained by it."""
        ids = np.fromiter(self.issued, dtype=np.int64)
        complete = ids[self.ring.complete(ids)]
        gained = []
        for iocb in complete.tolist():
            job, indices, _ = self.issued.pop(iocb)
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

    def leave(self, segment: int, size: int) -> list[GioJob]:
        """End with -EBADF what has not begun on a segment of `size` bytes. Returns the jobs that gained by it."""
        if segment in self.segments:
            self.segments.remove(segment)
        self.backend.forget(segment)
        start = self.backend.range_of(segment)
        if start is not None:
            self.twin.refuse(start, size)
        return self.harvest() + self.drop(errno.EBADF, segment=(segment, size))

    def detach(self, segment: int, size: int) -> bool:
        """False while something that has begun is under way on the segment."""
        parts = self.issued.values()
        busy = any((part.job.batch["offset"][part.indices] // np.uint64(size) == segment).any() for part in parts)
        return self.backend.detach(segment, busy)

    def hangs(self, seconds: float) -> bool:
        """Whether a drive that can be reset has owed an answer for so long."""
        before = time.monotonic() - seconds
        return self.backend.resets and not self.paused and any(part.since < before for part in self.issued.values())

    def halt(self) -> bool:
        """Make what is out touch no memory any more. Without the lock, while it is `paused`. False: a thread of ours
        does not end, and nothing changes."""
        if not self.twin.stop(_STOP_SECONDS):
            return False
        try:
            self.backend.stop()
        except EngineError:
            self.dead = True
        return True

    def abort(self) -> list[GioJob]:
        """After `halt`: end everything that was out with -EIO. Returns the jobs that gained by it."""
        self.twin.close(0)
        for pair in range(len(self.backend.pairs.table)):
            address = self.backend.pairs.table[pair : pair + 1].ctypes.data
            self._native.gio_abort_all(self.ring.context.ctypes.data, address)
        return self.harvest()

    def revive(self) -> None:
        """After `abort`: begin anew. Without the lock, while it is `paused`."""
        try:
            if not self.dead:
                self.backend.restart()
        except EngineError:
            self.dead = True
        self.twin = self._make_twin()

    def close(self, timeout: float) -> bool:
        """Stop controller and twin: controllers first, since they ring the twin."""
        if isinstance(self.backend, SoftwareBackend):
            return self.backend.close(timeout) and self.twin.close(timeout)
        return self.twin.close(timeout) and self.backend.close(timeout)

    def _make_twin(self) -> Twin:
        return Twin(self._native, self.ring, self.backend.endpoints, self._bell, self.backend.pace)

    @staticmethod
    def _contexts(job: GioJob, indices: Indices) -> Batch:
        contexts = job.batch[indices]
        contexts["drive"] = 0  # the only one of this ring
        return contexts
