"""The engine whose I/O goes the way of gio_uring, without a GPU: IOCBs, the CPU twin of the kernel, NVMe queue pairs,
and a software controller per drive that serves them from segment files.

Works with any drive and needs no privilege. It is what the protocol is tried with, and no faster than `uring`.
"""

import ctypes
import errno
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, IoClass, Results, Ticket
from tutti_sglang.engine.gio_drive import GioDrive, GioJob, Options
from tutti_sglang.engine.home import Home
from tutti_sglang.engine.transfers import malformed
from tutti_sglang.errors import EngineError
from tutti_sglang.gio import abi
from tutti_sglang.gio.twin import Bell
from tutti_sglang.kernels import gio_native

_SWEEP_SECONDS = 1.0
_DETACH_SECONDS = 0.005
_STOP_SECONDS = 10.0  # for threads that have nothing left to do


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
        self.native, self.options = native, Options(segment_size, depth, max_io, block, plan)
        self.bell = Bell(native)
        self._drives: dict[int, GioDrive] = {}
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = self._ended = False
        self._home = Home()

    def attach(self, drive: int, segment: int, fd: int) -> None:
        """As Engine.attach; the first file of a drive starts its threads."""
        self._home.check()
        with self._lock:
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._harvest_loop, name="tutti-gio", daemon=True)
                self._thread.start()
            if drive not in self._drives:
                self._drives[drive] = GioDrive(self.native, self.bell, self.options, drive)
            self._drives[drive].controller.attach(segment, fd)
            self._drives[drive].segments.append(segment)

    def detach(self, drive: int, segment: int, timeout: float = 5.0) -> bool:
        """As Engine.detach."""
        self._home.check()
        until = time.monotonic() + timeout
        with self._lock:
            place = None if self._ended else self._drives.get(drive)
            if place is None:
                return True
            if segment in place.segments:
                place.segments.remove(segment)
            place.controller.detach(segment, 0)  # what starts from now on finds no file
            place.twin.refuse(segment * self.options.segment_size, self.options.segment_size)
            dropped = place.drop(errno.EBADF, segment=(segment, self.options.segment_size))
        self._conclude(dropped)
        with self._lock:  # given away while it waits: close() must not take the controller from under a native call
            while not self._ended and not place.controller.detach(segment, 0):
                if time.monotonic() >= until:
                    return False
                self._lock.wait(_DETACH_SECONDS)
        return True

    def submit(self, batch: Batch, klass: IoClass, deadline: float, hold: Any = None) -> Ticket:
        """As Engine.submit."""
        self._home.check()
        assert batch.dtype == IOCTX_DTYPE
        assert batch.ndim == 1
        job = GioJob(batch.copy(), deadline, hold)
        bad = malformed(job.batch, self.options.segment_size)
        bad |= job.batch["length"] > self.options.limits.transfer * abi.PIECES
        with self._lock:
            self._check_open()
            job.settle(np.flatnonzero(bad), -errno.EINVAL)
            for drive in np.unique(job.batch["drive"][~bad]).tolist():
                place = self._drives.get(drive)
                here = ~bad & (job.batch["drive"] == drive)
                segments = job.batch["offset"] // np.uint64(self.options.segment_size)
                known = here & np.isin(segments, place.segments if place else [])
                job.settle(np.flatnonzero(here & ~known), -errno.EBADF)
                if place:
                    place.push(job, np.flatnonzero(known), klass)
                    place.pump()
        self._conclude([job])
        return job

    def wait(self, ticket: Ticket, timeout: float) -> Results:
        """As Engine.wait."""
        self._home.check()
        assert isinstance(ticket, GioJob)
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
        self._home.check()
        assert isinstance(ticket, GioJob)
        self._drop(ticket)

    def close(self, timeout: float) -> bool:
        """As Engine.close. A forked child has no I/O: there it does nothing."""
        if not self._home.here():
            return True
        with self._lock:
            self._closed = True
            self._lock.wait_for(self._is_idle, max(0.0, timeout))
        self._drop(None)
        self._harvest()
        with self._lock:
            if not self._is_idle() or not all(place.close(_STOP_SECONDS) for place in self._drives.values()):
                return False
            self._drives.clear()
            ended, self._ended = self._ended, True
        if not ended:
            self.bell.ring()
            if self._thread is not None:
                self._thread.join()
            self.bell.close()
        return True

    def _drop(self, job: GioJob | None) -> None:
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

    def _conclude(self, jobs: list[GioJob]) -> None:
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
