"""The engine whose I/O goes the way of gio_uring, without a GPU: IOCBs, the CPU twin of the kernel, NVMe queue pairs,
and per drive either a software controller, which serves them from segment files, or the drive itself, behind VFIO.

With software controllers it works with any drive and needs no privilege: it is what the protocol is tried with, and no
faster than `uring`.
"""

import ctypes
import errno
import logging
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, IoClass, Results, Ticket
from tutti_sglang.engine.gio_backend import Options, RawBackend, RawDrives, SoftwareBackend
from tutti_sglang.engine.gio_drive import GioDrive, GioJob
from tutti_sglang.engine.home import Home
from tutti_sglang.engine.transfers import malformed
from tutti_sglang.errors import EngineError
from tutti_sglang.gio import abi
from tutti_sglang.gio.queues import HostMemory
from tutti_sglang.gio.twin import Bell
from tutti_sglang.kernels import gio_native
from tutti_sglang.memory import Addresses

_logger = logging.getLogger("tutti_sglang.engine")

_SWEEP_SECONDS = 1.0
_DETACH_SECONDS = 0.005
_STOP_SECONDS = 10.0  # for threads that have nothing left to do


class GioEngine:
    """The protocol is `engine.base.Engine`, and `engine.base.Straight`."""

    name = "gio"

    def __init__(  # noqa: PLR0913
        self,
        segment_size: int,
        depth: int,
        max_io: int,
        native: ctypes.CDLL | None = None,
        *,
        block: int = 512,
        plan: npt.NDArray[np.void] | None = None,
        raw: RawDrives = RawDrives({}, ()),  # noqa: B008
    ) -> None:
        """`depth`: commands in flight per drive; `max_io`: bytes of one at most, the software controllers' MDTS;
        `block`: bytes of their logical blocks, a power of two: IOCTX are whole blocks (1 takes any);
        `plan`: bad blocks (testing.faults.FaultPlan.packed); `raw`: drives behind VFIO. Raises EngineError without the
        native library, or when a drive does not give what is needed."""
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
        self._raw = bool(raw.volumes)
        self._reset_seconds, self._resetting = raw.reset_seconds, threading.Lock()
        for number in raw.volumes:
            memory = HostMemory()
            backend = RawBackend(native, memory, self.options, raw, number)
            self._drives[number] = GioDrive(native, self.bell, memory, backend)

    def attach(self, drive: int, segment: int, fd: int) -> None:
        """As Engine.attach; the first file of a drive starts its threads."""
        self._home.check()
        with self._lock:
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._harvest_loop, name="tutti-gio", daemon=True)
                self._thread.start()
            if drive not in self._drives:
                memory = HostMemory()
                backend = SoftwareBackend(self.native, memory, self.options, drive)
                self._drives[drive] = GioDrive(self.native, self.bell, memory, backend)
            self._drives[drive].backend.attach(segment, fd)
            self._drives[drive].segments.append(segment)

    def detach(self, drive: int, segment: int, timeout: float = 5.0) -> bool:
        """As Engine.detach."""
        self._home.check()
        until = time.monotonic() + timeout
        with self._lock:
            place = None if self._ended else self._drives.get(drive)
            if place is None:
                return True
            dropped = place.leave(segment, self.options.segment_size)
        self._conclude(dropped)
        with self._lock:  # given away while it waits: close() must not take the controller from under a native call
            while not self._ended and not place.detach(segment, self.options.segment_size):
                if time.monotonic() >= until:
                    return False
                self._lock.wait(_DETACH_SECONDS)
        return True

    def reaches(self, rows: Addresses, sizes: npt.NDArray[np.int64]) -> bool:
        """As Straight.reaches: software controllers reach all memory by dwords; drives behind VFIO what was mapped."""
        return not self._raw and not ((rows | sizes.astype(np.uint64)) & np.uint64(3)).any()

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
                for iocb, part in place.issued.items():
                    if part.job is ticket:
                        results[part.indices] = place.outcome(iocb)
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
        for place in self._hanging(0.0):
            self._reset(place)
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
            for place in self._hanging(self._reset_seconds):
                self._reset(place)
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

    def _hanging(self, seconds: float) -> list[GioDrive]:
        with self._lock:
            return [place for place in self._drives.values() if place.hangs(seconds)]

    def _reset(self, place: GioDrive) -> None:
        """End what hangs on a drive by resetting it: then its memory is ours again, and its results are -EIO. Without
        the lock where it takes time."""
        with self._resetting:
            with self._lock:
                if not place.issued:
                    return
                place.paused = True
            _logger.warning("tutti: an NVMe drive does not answer; it is reset")
            if place.halt():
                with self._lock:
                    gained = place.abort()
                self._conclude(gained)
                place.revive()
            with self._lock:
                place.paused = False
                gained = place.drop(errno.EIO) if place.dead else []
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
