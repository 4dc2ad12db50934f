"""The software controller: a native thread that is an NVMe drive to a queue pair, over segment files."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_sglang.errors import EngineError
from tutti_sglang.gio import abi
from tutti_sglang.gio.queues import Limits, QueuePairs

_MILLION = 1_000_000


@dataclass(frozen=True)
class Faults:
    """How a controller misbehaves: chances between 0 and 1, drawn per command from `seed`.

    `fail`: answers `status` and does nothing; `drop`: does its work and never answers (`release_dropped` answers late);
    `delay`: answers after up to `delay_seconds`, so that later commands overtake it.
    """

    seed: int = 0
    fail: float = 0.0
    status: int = abi.Status.UNRECOVERED_READ
    drop: float = 0.0
    delay: float = 0.0
    delay_seconds: float = 0.001
    reads: bool = True
    writes: bool = True

    def packed(self) -> npt.NDArray[np.void]:
        """(1,) FAULTS_DTYPE."""
        chances = [round(each * _MILLION) for each in (self.fail, self.drop, self.delay)]
        values = (
            self.seed,
            round(self.delay_seconds * 1e9),
            chances[0],
            self.status,
            *chances[1:],
            self.reads,
            self.writes,
        )
        return np.array([values], dtype=abi.FAULTS_DTYPE)


@dataclass(frozen=True)
class Service:
    """How a software controller serves: `workers` threads do the I/O (0: the thread that fetches does it, in order);
    after `spin_seconds` without a command it sleeps for `idle_seconds` at a time, unless it is woken."""

    workers: int = 2
    spin_seconds: float = 0.0
    idle_seconds: float = 0.1


class SoftwareController:
    """Serves the commands of `pairs` as a drive with `limits` does, from files of `segment_size` bytes.

    Block b of the namespace is byte b << block_shift of the space in which segment n starts at n * segment_size.
    """

    def __init__(
        self,
        native: ctypes.CDLL,
        limits: Limits,
        pairs: QueuePairs,
        segment_size: int,
        service: Service = Service(),
    ) -> None:
        self._native = native
        values = (
            limits.first_block + limits.blocks,
            segment_size,
            round(service.spin_seconds * 1e9),
            round(service.idle_seconds * 1e9),
            limits.nsid,
            limits.transfer,
            limits.block_shift,
            limits.sgl,
            service.workers,
        )
        packed = np.array([values], dtype=abi.LIMITS_DTYPE)
        self.handle = native.gio_controller_new(packed.ctypes.data)
        for pair in range(len(pairs.table)):
            native.gio_controller_add_queue(self.handle, pairs.table[pair : pair + 1].ctypes.data)

    @property
    def endpoint(self) -> int:
        """As twin.Endpoint."""
        return int(self._native.gio_controller_endpoint(self.handle))

    def map(self, region: npt.NDArray[np.void]) -> None:
        """Let commands name this memory ((1,) REGION_DTYPE), as an IOMMU would."""
        self._native.gio_controller_map(self.handle, region.ctypes.data)

    def attach(self, segment: int, fd: int) -> None:
        """Serve the segment from `fd`, which stays the caller's. Raises EngineError when it has a file."""
        if not self._native.gio_controller_attach(self.handle, segment, fd):
            raise EngineError(f"Segment {segment} has a file already", "Detach it first")

    def detach(self, segment: int, timeout: float) -> bool:
        """Forget the file: commands on it find unwritten blocks. False: one still moves its bytes after `timeout` s."""
        return not self.handle or bool(self._native.gio_controller_detach(self.handle, segment, _ns(timeout)))

    def set_faults(self, faults: Faults) -> None:
        """Misbehave from now on; the draw starts anew."""
        self._native.gio_controller_set_faults(self.handle, faults.packed().ctypes.data)

    def set_bad_blocks(self, plan: npt.NDArray[np.void], drive: int) -> None:
        """Be drive `drive` of a testing.faults.FaultPlan, given as its `packed()`. Before start."""
        self._native.gio_controller_set_bad_blocks(self.handle, plan.ctypes.data, drive)

    def start(self) -> None:
        """Serve."""
        self._native.gio_controller_start(self.handle)

    def wake(self) -> None:
        """Look for commands now."""
        self._native.gio_controller_wake(self.handle)

    def release_dropped(self) -> int:
        """Answer what was dropped. Returns how many commands that was."""
        return int(self._native.gio_controller_release_dropped(self.handle))

    def counts(self) -> dict[str, int]:
        """Commands, bytes moved, answers by kind, and whether a doorbell was out of range (`fatal`)."""
        counts = np.zeros(1, dtype=abi.COUNTS_DTYPE)
        self._native.gio_controller_counts(self.handle, counts.ctypes.data)
        return {name: int(counts[name][0]) for name in abi.COUNTS_DTYPE.names or ()}

    def close(self, timeout: float) -> bool:
        """Stop serving. False: a thread hangs in an I/O; what it may touch must then stay for ever."""
        if self.handle:
            if not self._native.gio_controller_stop(self.handle, _ns(timeout)):
                return False
            self._native.gio_controller_delete(self.handle)
            self.handle = None
        return True


def _ns(seconds: float) -> int:
    return max(0, round(min(seconds, 1e9) * 1e9))
