"""The engine whose drives write into device memory: GPUDirect Storage, by cuFile's blocking calls on threads.

Its queues, deadlines and quarantine are those of `threads`; only the transfer is another one. cuFile's own batches are
not used: they end together, and a call that hangs would hold up its neighbours on other drives.
"""

import errno
import logging
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import Operation
from tutti_sglang.engine.system import SYSTEM, Iovecs, Place, Seam
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels.gds import CuFile
from tutti_sglang.memory import PAGE, Addresses

logger = logging.getLogger(__name__)

Ranges = npt.NDArray[np.uint64]
"""(r, 2) start and end of registered device memory, ascending, no two of them overlapping."""


class Piece(NamedTuple):
    """`size` bytes at byte `place` of the memory registered at `base`."""

    base: int
    place: int
    size: int


def range_of(ranges: Ranges, addresses: Addresses, sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """(n,) which range the bytes lie in as a whole, -1: in none, they are host memory."""
    at = np.searchsorted(ranges[:, 0], addresses, side="right") - 1
    inside = (at >= 0) & (addresses + sizes <= ranges[at, 1]) if len(ranges) else np.zeros(len(at), np.bool_)
    return np.where(inside, at, -1)


def plan_pieces(ranges: Ranges, iovecs: Iovecs) -> tuple[int, list[Piece]]:
    """How many of the (k,) pieces of memory come before one of the other kind, host or device; and as calls of cuFile,
    neighbours joined: no call where they are host memory."""
    where = range_of(ranges, iovecs[:, 0], iovecs[:, 1])
    others = np.flatnonzero((where < 0) != (where[0] < 0))
    count = int(others[0]) if len(others) else len(iovecs)
    pieces: list[Piece] = []
    for number, (address, size) in zip(where[:count].tolist(), iovecs[:count].tolist(), strict=True):
        if number < 0:
            break
        base = int(ranges[number, 0])
        last = pieces[-1] if pieces else None
        if last and last.base == base and last.place + last.size == address - base:
            pieces[-1] = last._replace(size=last.size + size)
        else:
            pieces.append(Piece(base, address - base, size))
    return count, pieces


class GdsSystem:
    """The seam of `threads`, by cuFile where the memory is the device's."""

    def __init__(self, library: CuFile, system: Seam = SYSTEM) -> None:
        self._library, self._system = library, system
        self.ranges: Ranges = np.empty((0, 2), np.uint64)
        self.handles: dict[int, int] = {}

    def transfer(self, operation: Operation, place: Place, iovecs: Iovecs) -> int:
        """As Seam.transfer."""
        count, pieces = plan_pieces(self.ranges, iovecs)
        if not pieces:
            return self._system.transfer(operation, place, iovecs[:count])
        handle, moved = self.handles.get(place.fd), 0
        if handle is None:
            return -errno.EBADF
        for piece in pieces:
            offset, write = place.offset + moved, operation is Operation.WRITE
            result = self._library.move(write, handle, piece.base, piece.size, offset, piece.place)
            if result < 0:
                return moved or result
            moved += result
            if result < piece.size:
                break
        return moved


class GdsEngine(ThreadsEngine):
    """The protocol is `engine.base.Engine`, and `engine.base.Straight` for memory that was registered."""

    name = "gds"

    def __init__(
        self, segment_size: int, workers: int, max_io: int, library: CuFile | None = None, system: Seam = SYSTEM
    ) -> None:
        """As ThreadsEngine, on a thread whose CUDA context is that of the memory. `system`: for host memory.
        EngineError where cuFile does not start."""
        self._library = library or CuFile()
        self._gds = GdsSystem(self._library, system)
        self._files: dict[tuple[int, int], int] = {}
        self._ended = False
        super().__init__(segment_size, workers, max_io, self._gds)

    def register(self, address: int, size: int) -> None:
        """Device memory that batches may name, before the first that does. EngineError."""
        self._library.register_memory(address, size)
        ranges = [*self._gds.ranges.tolist(), [address, address + size]]
        self._gds.ranges = np.array(sorted(ranges), dtype=np.uint64)

    def attach(self, drive: int, segment: int, fd: int) -> None:
        """As Engine.attach. A file that cuFile refuses serves host memory; what names the device's ends with -EBADF."""
        self._check()
        try:
            self._gds.handles[fd] = self._library.register_file(fd)
        except EngineError as error:
            logger.warning("tutti: %s; its tensors go through host memory", error)
        super().attach(drive, segment, fd)
        self._files[drive, segment] = fd

    def detach(self, drive: int, segment: int, timeout: float = 5.0) -> bool:
        """As Engine.detach."""
        gone = super().detach(drive, segment, timeout)
        if gone:
            self._forget(self._files.pop((drive, segment), -1))
        return gone

    def reaches(self, rows: Addresses, sizes: npt.NDArray[np.int64]) -> bool:
        """As Straight.reaches: whole blocks of memory that was registered."""
        all_sizes = np.broadcast_to(sizes.astype(np.uint64), rows.shape)
        aligned = not ((rows | all_sizes) & np.uint64(PAGE - 1)).any()
        return aligned and bool((range_of(self._gds.ranges, rows.ravel(), all_sizes.ravel()) >= 0).all())

    def close(self, timeout: float) -> bool:
        """As Engine.close."""
        idle = super().close(timeout)
        if idle and self._home.here() and not self._ended:
            self._ended = True
            for fd in list(self._gds.handles):
                self._forget(fd)
            for start, _ in self._gds.ranges.tolist():
                self._library.forget_memory(start)
            self._library.close()
        return idle

    def _forget(self, fd: int) -> None:
        handle = self._gds.handles.pop(fd, None)
        if handle is not None:
            self._library.forget_file(handle)
