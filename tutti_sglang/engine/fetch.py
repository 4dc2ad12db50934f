"""A whole read: pieces of staging are filled by the drives, copied out and checksummed, and filled again.

The native engine does it in one foreign call. Others come back to Python after each wait and each copy, and beside a
busy Python thread each way back costs up to a switch interval (5 ms).
"""

import errno
import time
from collections import deque
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum, memory
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import IN_PROGRESS, Batch, IoClass, Results, Ticket
from tutti_sglang.errors import EngineError
from tutti_sglang.memory import Addresses

Places = npt.NDArray[np.uint32]


class Fetch(NamedTuple):
    """n objects of T tensors to read in p pieces; the memory of piece i is that of piece i - lanes.

    batch: (m,) reads, piece after piece; owner: (m,) the object of each; contexts: (p + 1,) where the reads of each
    piece start, and m; objects: (p + 1,) where its objects start, and n; target, source: (n, T) rows, and where they
    lie in staging; sizes: (T,) bytes > 0; lanes: pieces under way at once; hold: as in Engine.submit; sums: whether to
    sum.
    """

    batch: Batch
    owner: Places
    contexts: Places
    objects: Places
    target: Addresses
    source: Addresses
    sizes: npt.NDArray[np.integer[Any]]
    lanes: int
    klass: IoClass
    deadline: float
    hold: Any = None
    sums: bool = True


class Fetched(NamedTuple):
    """What became of it.

    results: (m,) as of Engine.wait, -ETIMEDOUT where a piece never started; copied: (n,) whether the object came whole
    and is in its rows; sums: (n, T) the checksums of those; open: tickets of pieces whose memory the drives still own.
    """

    results: Results
    copied: npt.NDArray[np.bool_]
    sums: Sums
    open: list[Ticket]


@runtime_checkable
class Fetching(Protocol):
    """An engine that does it by itself."""

    def fetch(self, request: Fetch) -> Fetched:
        """As `fetch`."""


def fetch(engine: Engine, request: Fetch) -> Fetched:
    """Read, copy and checksum until the deadline. No row is written after this has returned. Raises EngineError when
    the engine is closed."""
    return engine.fetch(request) if isinstance(engine, Fetching) else _Loop(engine, request).run()


class _Loop:
    """The twin of kernels/host/fetch.cpp."""

    def __init__(self, engine: Engine, request: Fetch) -> None:
        self._engine, self._request = engine, request
        shape = request.target.shape
        self._results = np.full(len(request.batch), -errno.ETIMEDOUT, dtype=np.int32)
        self._copied = np.zeros(shape[0], dtype=np.bool_)
        self._sums = np.zeros(shape, dtype=np.uint64)
        self._open: list[Ticket] = []

    def run(self) -> Fetched:
        """As `fetch`."""
        pieces = deque(range(len(self._request.objects) - 1))
        flying: deque[tuple[int, Ticket]] = deque()
        while pieces or flying:
            while pieces and len(flying) + len(self._open) < self._request.lanes and self._in_time():
                try:
                    flying.append((pieces[0], self._start(pieces[0])))
                    pieces.popleft()
                except EngineError:  # closed meanwhile: what is under way has to end before anybody gets its memory
                    if not (flying or self._open):
                        raise
                    pieces.clear()
            if not flying:
                break
            self._finish(*flying.popleft())
        return Fetched(self._results, self._copied, self._sums, self._open)

    def _in_time(self) -> bool:
        return time.monotonic() < self._request.deadline

    def _reads(self, piece: int) -> slice:
        return slice(*self._request.contexts[piece : piece + 2].tolist())

    def _start(self, piece: int) -> Ticket:
        batch, request = self._request.batch[self._reads(piece)], self._request
        return self._engine.submit(batch, request.klass, request.deadline, request.hold)

    def _finish(self, piece: int, ticket: Ticket) -> None:
        request, reads = self._request, self._reads(piece)
        results = self._engine.wait(ticket, max(0.0, request.deadline - time.monotonic()))
        if (results == IN_PROGRESS).any():
            self._engine.cancel(ticket)
            results = self._engine.wait(ticket, 0)
            if (results == IN_PROGRESS).any():
                self._open.append(ticket)
        self._results[reads] = results
        objects = slice(*request.objects[piece : piece + 2].tolist())
        self._copied[objects] = True
        self._copied[request.owner[reads][results != request.batch["length"][reads]]] = False
        whole = objects.start + np.flatnonzero(self._copied[objects])
        rows = request.target[whole], request.source[whole], request.sizes
        if request.sums:
            self._sums[whole] = checksum.copy_and_sum(*rows)
        else:
            memory.copy_rows(*rows)
