"""What became of the I/O of a batch: an errno per object, errors by drive for counters, health and the log."""

import errno
import os

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IN_PROGRESS, Operation, Results
from tutti_sglang.engine.moving import Moved
from tutti_sglang.metrics import Metrics
from tutti_sglang.store.drives import Drive
from tutti_sglang.store.health import Health
from tutti_sglang.store.report import Reporter

GOOD = 0
CORRUPT = errno.EBADMSG
"""The bytes are not those that were put."""

UNANSWERED = errno.EINPROGRESS
LATE = errno.ETIMEDOUT
"""The deadline came before the I/O was started."""

CHANGED = errno.ESTALE
"""The record is another one than before the read."""
EXPIRED = errno.ETIME
"""The read took longer than grace_seconds."""
UNOPENED = errno.EBADF
"""A file of the segment could not be opened."""

PERMANENT = frozenset([CORRUPT, errno.ENODATA, errno.ENOENT])
"""Asking again will not help: the object is removed."""

FULL = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])

_OURS = [errno.ECANCELED, errno.EBADF, errno.EINVAL, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR]
_DEVICE = [errno.EFAULT, errno.EOPNOTSUPP]
"""What cuFile says of memory and machines that it does not serve (kernels/gds.py)."""
_NOT_THE_DRIVE = frozenset([LATE, errno.ENODATA, *_OURS, *_DEVICE, *FULL])
"""Errors that say nothing about whether a drive works."""

Codes = npt.NDArray[np.int32]
"""(n,) GOOD or an errno per object."""


def codes(moved: Moved, objects: int) -> Codes:
    """(objects,) GOOD where all I/O of an object moved its full length, else an errno of it."""
    found = np.zeros(objects, dtype=np.int32)
    results, owner = moved.failed["result"], moved.failed["tag"]
    if len(results):
        np.maximum.at(found, owner, np.where(results < 0, -results, errno.ENODATA).astype(np.int32))
        found[owner[results == IN_PROGRESS]] = UNANSWERED  # before all others: its memory is not ours
    return found


class Ledger:
    """Books the results of batches: error counters, drive health, and a log line per kind and minute."""

    def __init__(self, drives: dict[int, Drive], metrics: Metrics, reporter: Reporter) -> None:
        self._drives = drives
        self._metrics = metrics
        self._reporter = reporter

    def book(self, moved: Moved, operation: Operation) -> None:
        """One batch."""
        for ordinal in np.flatnonzero(moved.counts).tolist():
            mine = moved.failed["result"][moved.failed["drive"] == ordinal]
            if len(mine):
                self._book_drive(ordinal, operation, mine, int(moved.counts[ordinal]))
            else:
                self._health(ordinal, operation).record(0, 1)

    def corrupt(self, objects: int) -> None:
        """Objects whose bytes are not those that were put."""
        self._reporter.warn("checksum", f"{objects} objects failed their checksum and are removed")

    def show(self, drive: Drive) -> None:
        """Let the gauge say whether the drive serves."""
        self._metrics.set("tutti_drive_in_service", int(drive.serves), drive=str(drive.ordinal))

    def refused(self, ordinal: int, operation: str, error: OSError) -> None:
        """A drive would not do something with a whole file. Unless that is not its fault, nothing is written to it for
        a while."""
        drive, kind = self._drives[ordinal], errno.errorcode.get(error.errno or 0, str(error))
        self._metrics.add("tutti_io_errors", drive=str(ordinal), op=operation, kind=kind)
        self._reporter.warn(f"{operation} {kind} {ordinal}", f"{operation} failed on {drive.path}: {error}")
        if error.errno not in _NOT_THE_DRIVE and drive.writes.hang(f"{operation}: {error.strerror}"):
            self.show(drive)

    def _book_drive(self, ordinal: int, operation: Operation, failed: Results, total: int) -> None:
        drive, name = self._drives[ordinal], operation.name.lower()
        blamed, hung, reason = 0, False, ""
        for result, count in zip(*np.unique(failed, return_counts=True), strict=True):
            code = -int(result) if result < 0 else errno.ENODATA
            kind = errno.errorcode.get(code, str(code))
            self._metrics.add("tutti_io_errors", int(count), drive=str(ordinal), op=name, kind=kind)
            self._reporter.warn(
                f"{name} {kind} {ordinal}", f"{count} I/O failed on {drive.path}: {name}, {kind} ({os.strerror(code)})"
            )
            if code == UNANSWERED:
                hung, reason = True, "it did not answer in time"
            elif code not in _NOT_THE_DRIVE:
                blamed, reason = blamed + int(count), f"{name}: {os.strerror(code)}"
        if self._judge(drive, operation, blamed, total, hung, reason):
            self._reporter.warn(f"out {ordinal}", f"{drive.path} is out of service ({reason}); it will be tried again")
            self.show(drive)

    def _judge(self, drive: Drive, operation: Operation, blamed: int, total: int, hung: bool, reason: str) -> bool:
        if hung:
            return any([drive.reads.hang(reason), drive.writes.hang(reason)])
        return self._health(drive.ordinal, operation).record(blamed, total, reason)

    def _health(self, ordinal: int, operation: Operation) -> Health:
        drive = self._drives[ordinal]
        return drive.reads if operation is Operation.READ else drive.writes
