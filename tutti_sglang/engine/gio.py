"""The engine whose I/O goes the way of gio_uring, without a GPU: IOCBs, the CPU twin of the kernel, NVMe queue pairs,
and a software controller per drive that serves them from segment files.

Works with any drive and needs no privilege. It is what the protocol is tried with, and no faster than `uring`.
"""

import ctypes
import errno
import os
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IN_PROGRESS, IOCTX_DTYPE, Batch, IoClass, Results, Ticket
from tutti_sglang.engine.transfers import malformed
from tutti_sglang.errors import EngineError
from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import Service, SoftwareController
from tutti_sglang.gio.queues import DriveQueues, HostMemory, Limits, QueuePairs, map_region
from tutti_sglang.gio.rings import FOREVER_NS, IocbRing
from tutti_sglang.gio.twin import Bell, Twin
from tutti_sglang.kernels import gio_native

_DEPTH = 32  # IOCBs per drive; more than that waits in Python
_USER_SPACE = 1 << 47  # bytes: all addresses of a process
_BUS = 1 << 50  # where a controller finds address 0: an address that was never translated is refused
_SWEEP_SECONDS = 1.0

Indices = npt.NDArray[np.int64]


class _Job(Ticket):
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


class _Part(NamedTuple):
    """The IOCTX of a job that share an IOCB."""

    job: _Job
    indices: Indices


class _Drive:
    """One drive: its ring, mover and controller, and what waits for an IOCB."""

    def __init__(self, engine: "GioEngine", number: int) -> None:
        shift = engine.block.bit_length() - 1
        limits = Limits(blocks=1 << (62 - shift), block_shift=shift, mdts=engine.max_io)
        self.memory = HostMemory()
        pairs = QueuePairs(self.memory, 1, engine.depth.bit_length())
        everything = map_region(0, _USER_SPACE, _BUS)
        self.ring = IocbRing(_DEPTH, self.memory, [DriveQueues(limits, pairs)], everything)
        self.controller = SoftwareController(
            engine.native, limits, pairs, engine.segment_size, Service(workers=engine.depth)
        )
        self.controller.map(everything)
        if engine.plan is not None:
            self.controller.set_bad_blocks(engine.plan, number)
        self.twin = Twin(engine.native, self.ring, [self.controller], engine.bell, window=engine.depth)
        self.controller.start()
        self.segments: list[int] = []  # that have a file
        self.waiting: tuple[deque[_Part], ...] = tuple(deque() for _ in IoClass)
        self.issued: dict[int, _Part] = {}

    def push(self, job: _Job, indices: Indices, klass: IoClass) -> None:
        """Queue IOCTX of `job`."""
        for part in self.ring.split(self._contexts(job, indices)):
            self.waiting[klass].append(_Part(job, indices[part]))

    def pump(self) -> None:
        """Issue what there are IOCBs for; a class leaves one to each class above it."""
        for klass, parts in enumerate(self.waiting):
            while parts and len(self.issued) < _DEPTH - klass:
                part = parts.popleft()
                reserved = self.ring.get_iocb(1)
                assert reserved is not None
                iocb = int(reserved[0])
                self.ring.fill(iocb, self._contexts(*part))
                self.issued[iocb] = part
                self.twin.issue(iocb, klass, int(min(max(part.job.deadline, 0) * 1e9, FOREVER_NS)))

    def harvest(self) -> list[_Job]:
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

    def drop(self, error: int, job: _Job | None = None, segment: tuple[int, int] | None = None) -> list[_Job]:
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
    def _contexts(job: _Job, indices: Indices) -> Batch:
        contexts = job.batch[indices]
        contexts["drive"] = 0  # the only one of this ring
        return contexts


class GioEngine:
    """The protocol is `engine.base.Engine`. IOCTX are not joined: each is one command per `max_io` bytes."""

    name = "gio"

    def __init__(
        self,
        segment_size: int,
        depth: int,
        max_io: int,
        native: ctypes.CDLL | None = None,
        *,
        block: int = 512,
        plan: npt.NDArray[np.void] | None = None,
    ) -> None:
        """`depth`: commands in flight per drive; `max_io`: the controllers' MDTS, bytes; `block`: bytes of a logical
        block, a power of two: IOCTX are whole blocks (1, which no NVMe drive has, takes any); `plan`: bad blocks
        (testing.faults.FaultPlan.packed). Raises EngineError without the native library."""
        native = native or gio_native.library()
        if native is None:
            raise EngineError(
                "The gio engine's native library was not built", "Install a C++20 compiler, then reinstall"
            )
        assert block.bit_count() == 1
        self.native, self.segment_size, self.depth, self.max_io = native, segment_size, depth, max_io
        self.block, self.plan = block, plan
        self.bell = Bell(native)
        self._drives: dict[int, _Drive] = {}
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = self._ended = False
        self._pid = os.getpid()

    def attach(self, drive: int, segment: int, fd: int) -> None:
        """As Engine.attach; the first file of a drive starts its threads."""
        self._check_process()
        with self._lock:
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._harvest_loop, name="tutti-gio", daemon=True)
                self._thread.start()
            if drive not in self._drives:
                self._drives[drive] = _Drive(self, drive)
            self._drives[drive].controller.attach(segment, fd)
            self._drives[drive].segments.append(segment)

    def detach(self, drive: int, segment: int, timeout: float = 5.0) -> bool:
        """As Engine.detach."""
        self._check_process()
        until = time.monotonic() + timeout
        with self._lock:
            place = None if self._ended else self._drives.get(drive)
            if place is None:
                return True
            if segment in place.segments:
                place.segments.remove(segment)
            place.controller.detach(
                segment, 0
            )  # what starts from now on finds no file; the wait comes without the lock
            place.twin.refuse(segment * self.segment_size, self.segment_size)
            dropped = place.drop(errno.EBADF, segment=(segment, self.segment_size))
        self._conclude(dropped)
        return place.controller.detach(segment, until - time.monotonic())

    def submit(self, batch: Batch, klass: IoClass, deadline: float, hold: Any = None) -> Ticket:
        """As Engine.submit."""
        self._check_process()
        assert batch.dtype == IOCTX_DTYPE
        assert batch.ndim == 1
        job = _Job(batch.copy(), deadline, hold)
        bad = malformed(job.batch, self.segment_size) | (job.batch["length"] > np.uint64(self.max_io) * abi.PIECES)
        with self._lock:
            self._check_open()
            job.settle(np.flatnonzero(bad), -errno.EINVAL)
            for drive in np.unique(job.batch["drive"][~bad]).tolist():
                place = self._drives.get(drive)
                here = ~bad & (job.batch["drive"] == drive)
                segments = job.batch["offset"] // np.uint64(self.segment_size)
                known = here & np.isin(segments, place.segments if place else [])
                job.settle(np.flatnonzero(here & ~known), -errno.EBADF)
                if place:
                    place.push(job, np.flatnonzero(known), klass)
                    place.pump()
        self._conclude([job])
        return job

    def wait(self, ticket: Ticket, timeout: float) -> Results:
        """As Engine.wait."""
        self._check_process()
        assert isinstance(ticket, _Job)
        if not ticket.done.wait(min(max(0.0, timeout), threading.TIMEOUT_MAX)):
            self._harvest()
        with self._lock:
            results = ticket.results.copy()
            for place in self._drives.values():
                for iocb, (job, indices) in place.issued.items():
                    if job is ticket:
                        results[indices] = place.outcome(iocb)
        return results

    def cancel(self, ticket: Ticket) -> None:
        """As Engine.cancel."""
        self._check_process()
        assert isinstance(ticket, _Job)
        self._drop(ticket)

    def close(self, timeout: float) -> bool:
        """As Engine.close. A forked child has no I/O: there it does nothing."""
        if os.getpid() != self._pid:
            return True
        with self._lock:
            self._closed = True
            self._lock.wait_for(self._is_idle, max(0.0, timeout))
        self._drop(None)
        self._harvest()
        with self._lock:
            if not self._is_idle() or not all(place.close(_SWEEP_SECONDS) for place in self._drives.values()):
                return False
            self._drives.clear()
            ended, self._ended = self._ended, True
        if not ended:
            self.bell.ring()
            if self._thread is not None:
                self._thread.join()
            self.bell.close()
        return True

    def _drop(self, job: _Job | None) -> None:
        """End with -ECANCELED what has not started, of one job or of all."""
        with self._lock:
            dropped = []
            for place in self._drives.values():
                dropped += place.drop(errno.ECANCELED, job)
                for iocb, part in place.issued.items():
                    if job in (None, part.job):
                        place.twin.cancel(iocb)
        self._conclude(dropped)

    def _harvest_loop(self) -> None:
        seen = self.bell.count()
        while not self._ended:
            self._harvest()
            seen = self.bell.wait(seen, self._until_next_deadline())

    def _harvest(self) -> None:
        """Settle what is complete, end what waited past its deadline, issue what there is now room for."""
        with self._lock:
            gained = []
            now = time.monotonic()
            for place in self._drives.values():
                gained += place.harvest()
                for job in {part.job for parts in place.waiting for part in parts if part.job.deadline <= now}:
                    gained += place.drop(errno.ETIMEDOUT, job)
                place.pump()
        self._conclude(gained)

    def _until_next_deadline(self) -> float:
        with self._lock:
            waiting = [p.job.deadline for d in self._drives.values() for parts in d.waiting for p in parts]
        return min(_SWEEP_SECONDS, max(0.0, min(waiting) - time.monotonic())) if waiting else _SWEEP_SECONDS

    def _conclude(self, jobs: list[_Job]) -> None:
        """Let those go that have nothing left to settle. Without the lock: what `hold` held may end, and ask for us."""
        for job in jobs:
            if not job.pending:
                job.hold = None
                job.done.set()
        with self._lock:
            self._lock.notify_all()

    def _is_idle(self) -> bool:
        return not any(place.issued or any(place.waiting) for place in self._drives.values())

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("The I/O engine is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineError(
                "An I/O engine does not survive fork(): its threads are in the parent", "Open the store in this process"
            )
