"""What waits for a drive and in which order it starts: bookkeeping under one lock per drive, no I/O."""

import errno
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IN_PROGRESS, Batch, IoClass, Results, Ticket
from tutti_sglang.engine.transfers import Transfer
from tutti_sglang.errors import EngineError


class Job(Ticket):
    """A batch on its way."""

    def __init__(self, batch: Batch, bad: npt.NDArray[np.bool_], deadline: float, hold: Any) -> None:
        """`bad`: (n,) what ends at once, with -EINVAL."""
        super().__init__(batch)
        self.deadline, self.hold = deadline, hold
        self.iovecs = np.column_stack([batch["address"], batch["length"].astype(np.uint64)])
        self.queues: list[DriveQueue] = []
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._results = np.where(bad, -errno.EINVAL, IN_PROGRESS).astype(np.int32)
        self._pending = len(batch) - int(bad.sum())
        if not self._pending:
            self.finish()

    def record(self, transfer: Transfer, results: Results | int) -> bool:
        """A transfer has ended; each ends once. True: it was the last, call `finish`."""
        with self._lock:
            self._results[transfer.first : transfer.last] = results
            self._pending -= transfer.last - transfer.first
            return not self._pending

    def results(self) -> Results:
        """(n,) as they are now."""
        with self._lock:
            return self._results.copy()

    def finish(self) -> None:
        """Release what the job holds and wake who waits. Not under a lock: at its end `hold` may ask for this job."""
        self.hold = None
        self.done.set()


class _Share:
    """What has not started of one job on one drive."""

    def __init__(self, job: Job, transfers: list[Transfer]) -> None:
        self.job = job
        self.transfers = deque(transfers)


class File:
    """A segment's file on this drive."""

    def __init__(self, segment: int, fd: int) -> None:
        self.segment, self.fd = segment, fd
        self.in_flight = 0


class Task(NamedTuple):
    """What a thread does next: move `transfer` of `job` on `file`, or end it, when it comes too late to have one."""

    job: Job
    transfer: Transfer
    file: File | None
    klass: int


class DriveQueue:
    """The queue of one drive: demand before preload before write, and jobs of one class in turn."""

    def __init__(self, depth: int) -> None:
        """`depth`: transfers in flight at once. A class and those below it leave some of them to the classes above: a
        demand read must not wait until a slow drive has finished its writes."""
        self._limits = [max(1, depth - klass * -(-depth // 8)) for klass in IoClass]
        self._lock = threading.Lock()
        self._work, self._idle = threading.Condition(self._lock), threading.Condition(self._lock)
        self._shares: tuple[deque[_Share], ...] = tuple(deque() for _ in IoClass)
        self._files: dict[int, File] = {}
        self._leaving: list[File] = []
        self._running = [0 for _ in IoClass]
        self._stopped = False

    def attach(self, segment: int, fd: int) -> None:
        """Transfers of `segment` go to `fd` from now on."""
        with self._lock:
            if segment in self._files:
                raise EngineError(f"Segment {segment} has a file already", "Detach it first")
            self._files[segment] = File(segment, fd)

    def detach(self, segment: int, timeout: float) -> bool:
        """End what waits for the segment with -EBADF, wait for what is in flight; False when it did not end in time."""
        with self._lock:
            if segment in self._files:
                self._leaving.append(self._files.pop(segment))
            gone = self._pull(None, segment)
        settle(gone, errno.EBADF)
        with self._lock:
            return self._idle.wait_for(lambda: self._left(segment), timeout)

    def push(self, job: Job, klass: IoClass, transfers: list[Transfer]) -> None:
        """Queue `transfers` of `job`; end those of an unknown segment with -EBADF, after `stop` all with -ECANCELED."""
        with self._lock:
            error = errno.ECANCELED if self._stopped else errno.EBADF
            known = [] if self._stopped else [each for each in transfers if each.segment in self._files]
            if known:
                self._shares[klass].append(_Share(job, known))
                self._work.notify(len(known))
        if len(known) < len(transfers):
            settle([(job, each) for each in set(transfers) - set(known)], error)

    def take(self) -> Task | None:
        """The next task, once there is one; None after `stop`. It ends with `finish`."""
        with self._lock:
            while not (task := self._next()):
                if self._stopped:
                    return None
                self._work.wait()
            self._running[task.klass] += 1
            if task.file:
                task.file.in_flight += 1
            return task

    def finish(self, task: Task, results: Results | int) -> None:
        """A task of `take` is done: who sees its results may detach the file, who finds the queue idle sees them."""
        with self._lock:
            last = task.job.record(task.transfer, results)
            self._running[task.klass] -= 1
            if task.file:
                task.file.in_flight -= 1
            self._idle.notify_all()
        if last:
            task.job.finish()

    def drop(self, job: Job | None, error: int) -> None:
        """End with -`error` what has not started of `job`, None: of all."""
        with self._lock:
            gone = self._pull(job, None)
        settle(gone, error)

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is queued or in flight; False when the time was too short."""
        with self._lock:
            return self._idle.wait_for(lambda: not any(self._running) and not any(self._shares), timeout)

    def stop(self) -> None:
        """Let `take` answer None once the queue is empty."""
        with self._lock:
            self._stopped = True
            self._work.notify_all()

    def _next(self) -> Task | None:
        for klass, shares in enumerate(self._shares):
            if not shares or sum(self._running[klass:]) >= self._limits[klass]:
                continue
            share = shares.popleft()
            transfer = share.transfers.popleft()
            if share.transfers:
                shares.append(share)
            late = time.monotonic() > share.job.deadline
            return Task(share.job, transfer, None if late else self._files[transfer.segment], klass)
        return None

    def _left(self, segment: int) -> bool:
        self._leaving = [file for file in self._leaving if file.in_flight]
        return all(file.segment != segment for file in self._leaving)

    def _pull(self, job: Job | None, segment: int | None) -> list[tuple[Job, Transfer]]:
        """Take what has not started of one job or segment, None: of all, out of the queue."""
        gone: list[tuple[Job, Transfer]] = []
        for shares in self._shares:
            for share in shares if job is None else [each for each in shares if each.job is job]:
                gone += [(share.job, each) for each in share.transfers if segment in (None, each.segment)]
                share.transfers = deque(each for each in share.transfers if segment not in (None, each.segment))
            kept = [share for share in shares if share.transfers]
            shares.clear()
            shares.extend(kept)
        self._idle.notify_all()
        return gone


def settle(transfers: list[tuple[Job, Transfer]], error: int) -> None:
    """End them with -`error`. Not under a lock, as `Job.finish`."""
    for job, transfer in transfers:
        if job.record(transfer, -error):
            job.finish()
