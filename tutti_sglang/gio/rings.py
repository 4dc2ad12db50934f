"""The IOCB ring and the completion ring, with the four calls of the paper: init_queue, get_iocb, issue_io, wait_cqe.

The host fills IOCBs ahead of time, a mover (the GPU kernel, or CPU threads) takes them from there, and the completion
ring tells which are done. One thread uses a ring at a time.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tutti_sglang.gio import abi
from tutti_sglang.gio.queues import DriveQueues, Memory, build_drives

FOREVER_NS = (1 << 63) - 1
_IN_PROGRESS = -115  # -EINPROGRESS
_POLL_SECONDS = 50e-6

Batch = npt.NDArray[np.void]
"""(n,) abi.IOCTX_DTYPE."""


class Budget(NamedTuple):
    """Nanoseconds that a sub-I/O waits for a command slot, and then for its answer. By default 30 s each, which Linux
    gives a drive too (nvme_core.io_timeout): no kernel may spin for ever."""

    claim_ns: int = 30_000_000_000
    poll_ns: int = 30_000_000_000


BOUNDED = Budget()

Groups = npt.NDArray[np.integer[Any]]
"""(n,) of the IOCTX of a batch, those with equal ones may be moved by one command: they lie in one segment, say."""


class Lists(NamedTuple):
    """Memory for the SGLs of joined IOCTX, `Lists.size` bytes, which controllers read at `bus`."""

    address: int
    bus: int

    @staticmethod
    def size(depth: int) -> int:
        """Bytes that a ring of `depth` IOCBs needs."""
        return depth * abi.CONTEXTS * abi.SGL_DTYPE.itemsize


PATIENT = Budget(FOREVER_NS, FOREVER_NS)
"""For threads of the CPU, which may wait."""


class Mover(Protocol):
    """What carries out IOCBs."""

    def launch(self, first: int, count: int, pieces: int, event: Any, sms: int) -> None:
        """Start the IOCBs at `first` … `first + count - 1` (modulo depth) once `event` has happened, on `sms` SMs.
        `pieces`: sub-I/Os of the largest."""

    def reap(self) -> None:
        """Take the answers to commands that outlived their launch."""


class IocbRing:
    """`depth` IOCBs and completions for one context of drives and mapped memory."""

    def __init__(
        self,
        depth: int,
        memory: Memory,
        drives: Sequence[DriveQueues],
        regions: Batch,
        lists: Lists = Lists(0, 0),  # noqa: B008
    ) -> None:
        """`regions`: (m,) REGION_DTYPE; without `lists` only what is contiguous in memory too is joined."""
        assert depth > 0
        self.depth = depth
        self._takes_lists = np.array([bool(lists.address) and drive.limits.sgl for drive in drives])
        self.mdts = np.array([drive.limits.transfer for drive in drives], dtype=np.int64)
        self.most_queues = max(len(drive.pairs.table) for drive in drives)
        self._memory = memory
        iocbs = memory.iocbs(depth * abi.IOCB_DTYPE.itemsize)
        completions = memory.shared(depth * abi.COMPLETION_DTYPE.itemsize)
        self.iocbs = iocbs.view[: depth * abi.IOCB_DTYPE.itemsize].view(abi.IOCB_DTYPE)
        self.completions = completions.view[: depth * abi.COMPLETION_DTYPE.itemsize].view(abi.COMPLETION_DTYPE)
        context = np.zeros(1, dtype=abi.CONTEXT_DTYPE)
        context["iocbs"], context["completions"] = iocbs.address, completions.address
        context["works"] = memory.local(depth * abi.WORK_DTYPE.itemsize)
        context["regions"], context["region_count"] = memory.constant(regions), len(regions)
        context["drives"], context["drive_count"] = memory.constant(build_drives(memory, drives)), len(drives)
        context["lists"], context["lists_bus"] = lists
        context["depth"] = depth
        self.context = context
        self.context_address = memory.constant(context)
        self.mover: Mover | None = None
        self._taken = np.zeros(depth, dtype=bool)
        self._serials = np.zeros(depth, dtype=np.uint64)
        self._events: list[Any] = [None] * depth
        self._next = 0

    def get_iocb(self, nums: int, event: Any = None) -> npt.NDArray[np.int64] | None:
        """Reserve `nums` consecutive IOCBs; None when no such run is free. `event` (of CUDA, say) must have happened
        before their bytes move."""
        runs = (self._next + np.arange(self.depth)[:, None] + np.arange(nums)) % self.depth
        free = ~self._taken[runs].any(axis=1)
        if nums > self.depth or not free.any():
            return None
        ids = runs[int(np.argmax(free))]
        self._taken[ids] = True
        self._next = int(ids[-1] + 1) % self.depth
        for i in ids.tolist():
            self._events[i] = event
        return np.asarray(ids, dtype=np.int64)

    def fill(self, iocb: int, batch: Batch, budget: Budget = BOUNDED, groups: Groups | None = None) -> int:
        """Write `batch`, of at most abi.CONTEXTS IOCTX and abi.PIECES sub-I/Os, into a reserved IOCB, before issue_io.
        Those of one group that follow one another, in the batch and on the drive, become one command, as far as its
        size allows; without `groups` none do. Returns its number of sub-I/Os."""
        pieces = self.pieces(batch)
        joined = np.ones_like(pieces) if groups is None else self._join(batch, pieces, groups)
        pieces[joined == 0] = 0
        total = int(pieces.sum())
        assert 0 < len(batch) <= abi.CONTEXTS
        assert total <= abi.PIECES
        self._serials[iocb] += np.uint64(1)
        it = self.iocbs[iocb]
        it["contexts"][: len(batch)] = batch
        it["contexts"]["result"][: len(batch)] = _IN_PROGRESS
        it["status"][: len(batch)] = 0
        context = np.repeat(np.arange(len(batch)), pieces)
        piece = np.arange(total) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        it["map"][:total] = joined[context] - 1 << abi.JOIN_SHIFT | piece << abi.CONTEXT_BITS | context
        it["claim_ns"], it["poll_ns"] = budget
        it["count"], it["pieces"], it["cancel"], it["serial"] = len(batch), total, 0, self._serials[iocb]
        return total

    def pieces(self, batch: Batch) -> npt.NDArray[np.int64]:
        """(n,) sub-I/Os of each IOCTX; the mover counts alike (kernels/gio/sub_io.cuh, pieces_of)."""
        known = batch["drive"] < len(self.mdts)
        mdts = self.mdts[np.where(known, batch["drive"], 0)]
        whole = known & (batch["operation"] != abi.FLUSH) & (batch["length"] > 0)
        return np.where(whole, -(-batch["length"].astype(np.int64) // mdts), 1)

    def _join(self, batch: Batch, pieces: npt.NDArray[np.int64], groups: Groups) -> npt.NDArray[np.int64]:
        """(n,) how many IOCTX the command takes that begins with this one; 0: it is in one that began before."""
        n, length = len(batch), batch["length"].astype(np.int64)
        drive = np.minimum(batch["drive"], len(self.mdts) - 1)
        follows = np.zeros(n, dtype=bool)
        follows[1:] = (
            (batch["offset"][1:] == batch["offset"][:-1] + batch["length"][:-1])
            & (batch["operation"][1:] == batch["operation"][:-1])
            & (batch["drive"][1:] == batch["drive"][:-1])
            & (groups[1:] == groups[:-1])
            & (batch["operation"][1:] != abi.FLUSH)
            & (np.minimum(length[1:], length[:-1]) > 0)
            & (np.maximum(pieces[1:], pieces[:-1]) == 1)
            & (self._takes_lists[drive[1:]] | (batch["address"][1:] == batch["address"][:-1] + batch["length"][:-1]))
        )
        starts = np.flatnonzero(~follows)
        run = np.cumsum(~follows) - 1
        longest = np.maximum.reduceat(length, starts)
        most = np.clip(self.mdts[drive[starts]] // np.maximum(longest, 1), 1, abi.JOINED)
        first = np.flatnonzero((np.arange(n) - starts[run]) % most[run] == 0)
        joined = np.zeros(n, dtype=np.int64)
        joined[first] = np.diff(np.append(first, n))
        return joined

    def split(self, batch: Batch) -> list[slice]:
        """Cut a batch into parts that each fit an IOCB. None of its IOCTX may have more than abi.PIECES sub-I/Os."""
        ends = np.cumsum(self.pieces(batch))
        parts, at = [], 0
        while at < len(batch):
            before = int(ends[at - 1]) if at else 0
            stop = min(int(np.searchsorted(ends, before + abi.PIECES, side="right")), at + abi.CONTEXTS)
            assert stop > at, f"an IOCTX of {batch['length'][at]} bytes has more than {abi.PIECES} sub-I/Os"
            parts.append(slice(at, stop))
            at = stop
        return parts

    def issue_io(self, ids: npt.NDArray[np.int64], sms: int = 0) -> None:
        """Let the mover carry out filled IOCBs, on `sms` SMs: one launch per run of consecutive ones."""
        assert self.mover is not None
        self._memory.flush()
        starts = np.flatnonzero(np.append(True, np.diff(ids) % self.depth != 1))
        for run in np.split(ids, starts[1:]):
            event = self._events[run[0]]
            assert all(self._events[i] is event for i in run), "IOCBs that are issued together wait for one event"
            self.mover.launch(int(run[0]), len(run), int(self.iocbs["pieces"][run].max()), event, sms)

    def complete(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """(n,) which IOCBs are complete now: all results and bytes of those are visible."""
        return np.asarray(self.completions["serial"][ids] == self._serials[ids])

    def wait_cqe(self, ids: npt.NDArray[np.int64], timeout: float) -> npt.NDArray[np.bool_]:
        """Poll the completions of `ids` for at most `timeout` seconds. (n,) which are complete; the others are still
        the mover's, or wait for an answer that is late: ask again."""
        until = time.monotonic() + timeout
        while not (done := self.complete(ids)).all() and time.monotonic() < until:
            if self.mover is not None:
                self.mover.reap()
            time.sleep(_POLL_SECONDS)
        return done

    def cancel(self, ids: npt.NDArray[np.int64]) -> None:
        """What has not started of issued IOCBs ends with -ECANCELED."""
        self.iocbs["cancel"][ids] = 1

    def results(self, iocb: int) -> npt.NDArray[np.int32]:
        """(n,) bytes moved, -errno, or -EINPROGRESS, in the order of the batch."""
        it = self.iocbs[iocb]
        return np.array(it["contexts"]["result"][: it["count"]])

    def status(self, iocb: int) -> npt.NDArray[np.uint16]:
        """(n,) 0, the NVMe status or the abi.Local code of the first piece that failed, for those that have ended."""
        it = self.iocbs[iocb]
        return np.array(it["status"][: it["count"]])

    def release(self, ids: npt.NDArray[np.int64]) -> None:
        """Give complete IOCBs back to the ring."""
        assert self.complete(ids).all(), "its memory is still the controller's"
        self._taken[ids] = False


init_queue = IocbRing
"""The paper's name for making a ring."""
