"""The engine in pure Python: threads that call preadv and pwritev. Reference for the others, and last resort."""

import errno
import logging
import threading
import time
from typing import Any

import numpy as np

from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, IoClass, Operation, Results, Ticket
from tutti_sglang.engine.home import Home
from tutti_sglang.engine.queues import DriveQueue, File, Job, Task, settle
from tutti_sglang.engine.system import SYSTEM, Iovecs, Place, Seam, head, tail
from tutti_sglang.engine.transfers import Transfer, coalesce, malformed
from tutti_sglang.errors import EngineError

logger = logging.getLogger(__name__)


class ThreadsEngine:
    """`workers` threads for each drive that has a file. The protocol is `engine.base.Engine`."""

    name = "threads"

    def __init__(self, segment_size: int, workers: int, max_io: int, seam: Seam = SYSTEM) -> None:
        """`segment_size`, `max_io` (of one system call) in bytes; starts no thread yet."""
        self._segment_size, self._workers, self._max_io, self._seam = segment_size, workers, max_io, seam
        self._queues: dict[int, DriveQueue] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._home = Home()

    def attach(self, drive: int, segment: int, fd: int) -> None:
        """As Engine.attach; the first file of a drive starts its threads."""
        self._check()
        with self._lock:
            queue = self._queues.get(drive)
            if queue is None:
                queue = self._queues[drive] = DriveQueue(self._workers)
                self._start(drive, queue)
        queue.attach(segment, fd)

    def detach(self, drive: int, segment: int, timeout: float = 5.0) -> bool:
        """As Engine.detach."""
        self._home.check()
        queue = self._queues.get(drive)
        return queue is None or queue.detach(segment, timeout)

    def submit(self, batch: Batch, klass: IoClass, deadline: float, hold: Any = None) -> Ticket:
        """As Engine.submit."""
        self._check()
        assert batch.dtype == IOCTX_DTYPE
        assert batch.ndim == 1
        batch = batch.copy()
        bad = malformed(batch, self._segment_size)
        job = Job(batch, bad, deadline, hold)
        by_drive: dict[int, list[Transfer]] = {}
        for transfer in coalesce(batch, bad, self._segment_size, self._max_io):
            by_drive.setdefault(transfer.drive, []).append(transfer)
        job.queues = [self._queues[drive] for drive in by_drive if drive in self._queues]
        for drive, transfers in by_drive.items():
            if drive in self._queues:
                self._queues[drive].push(job, klass, transfers)
            else:
                settle([(job, each) for each in transfers], errno.EBADF)
        return job

    def wait(self, ticket: Ticket, timeout: float) -> Results:
        """As Engine.wait; also ends what has not started by the deadline, should all threads of a drive hang."""
        self._home.check()
        assert isinstance(ticket, Job)
        until = time.monotonic() + timeout
        if not _wait(ticket.done, min(until, ticket.deadline)) and time.monotonic() >= ticket.deadline:
            _drop(ticket, errno.ETIMEDOUT)
            _wait(ticket.done, until)
        return ticket.results()

    def cancel(self, ticket: Ticket) -> None:
        """As Engine.cancel."""
        self._home.check()
        assert isinstance(ticket, Job)
        _drop(ticket, errno.ECANCELED)

    def close(self, timeout: float) -> bool:
        """As Engine.close. A forked child has no I/O: there it does nothing."""
        if not self._home.here():
            return True
        until = time.monotonic() + timeout
        with self._lock:
            self._closed = True
        for queue in self._queues.values():
            queue.drain(until - time.monotonic())
            queue.drop(None, errno.ECANCELED)
            queue.stop()
        idle = all(queue.drain(0) for queue in self._queues.values())
        for thread in self._threads if idle else ():
            thread.join(1.0)
        return idle

    def _start(self, drive: int, queue: DriveQueue) -> None:
        for i in range(self._workers):
            # Daemons: a thread that a dead drive never answers must not keep the process from ending.
            thread = threading.Thread(target=self._serve, args=(queue,), name=f"tutti-{drive}-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, queue: DriveQueue) -> None:
        while task := queue.take():
            try:
                result = self._move(task, task.file) if task.file else -errno.ETIMEDOUT
            except Exception:
                logger.exception("An I/O thread met a bug; its I/O fails with EIO")
                result = -errno.EIO
            queue.finish(task, result)

    def _move(self, task: Task, file: File) -> Results:
        """(k,) results of one transfer. Where it fails, each IOCTX is tried alone, for the sake of its neighbours."""
        job, (first, last, drive, _) = task.job, task.transfer
        start = int(job.batch["offset"][first])
        place = Place(file.fd, start % self._segment_size, drive, start)
        operation = Operation(job.batch["operation"][first])
        iovecs = job.iovecs[first:last]
        results = iovecs[:, 1].astype(np.int32)
        size = int(results.sum(dtype=np.int64))
        moved, error = self._transfer(operation, place, iovecs, size)
        if moved == size:
            return results
        ends = np.cumsum(results, dtype=np.int64)
        served = int(np.searchsorted(ends, moved, side="right"))
        lengths = results[served:].tolist()
        results[served:] = error
        for i, length in enumerate(lengths if last - first > 1 else (), served):
            if time.monotonic() > job.deadline:
                break
            _, error = self._transfer(operation, place.after(int(ends[i]) - length), iovecs[i : i + 1], length)
            results[i] = error or length
        return results

    def _transfer(self, operation: Operation, place: Place, iovecs: Iovecs, size: int) -> tuple[int, int]:
        """Move `size` bytes, in as many system calls as it takes: (bytes moved, 0 or -errno)."""
        moved = 0
        while moved < size:
            whole = not moved and size <= self._max_io
            piece = iovecs if whole else head(tail(iovecs, moved), self._max_io)
            result = self._seam.transfer(operation, place.after(moved), piece)
            if result <= 0:
                return moved, result or -errno.EIO  # no progress: the end of a file that is too short, or a dead drive
            moved += result
        return moved, 0

    def _check(self) -> None:
        self._home.check()
        if self._closed:
            raise EngineError("The I/O engine is closed")


def _drop(job: Job, error: int) -> None:
    for queue in job.queues:
        queue.drop(job, error)


def _wait(event: threading.Event, until: float) -> bool:
    return event.wait(min(until - time.monotonic(), threading.TIMEOUT_MAX))
