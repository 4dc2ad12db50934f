"""What every engine promises: a batch of I/O contexts in, one result for each out."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import Batch, IoClass, Results, Ticket
from tutti_sglang.memory import Addresses


@runtime_checkable
class Engine(Protocol):
    """Moves bytes between memory and the segment files of the drives.

    Thread safe. A batch may mix drives, segments, reads and writes; its IOCTX are independent and complete in any
    order; those that follow one another both in the batch and on a drive are moved as one I/O. An engine never raises
    for an I/O problem: it is a negative errno in the result of that IOCTX alone. EngineError: `attach` of a segment
    that has a file, `attach` and `submit` after close(), and everything but `close` in a forked child.
    """

    name: str

    def attach(self, drive: int, segment: int, fd: int) -> None:
        """Make the segment's file on `drive` known; `fd` stays the caller's and open until `detach` returned True.
        The offsets of IOCTX divide by the engine's segment_size to find it; one of an unknown file ends with -EBADF."""

    def detach(self, drive: int, segment: int, timeout: float = 5.0) -> bool:
        """Forget the file: what has not started on it ends with -EBADF. Wait at most `timeout` seconds for what has.
        False when the drive has not answered: `fd` stays open and the place is kept until another call says True."""

    def submit(self, batch: Batch, klass: IoClass, deadline: float, hold: Any = None) -> Ticket:
        """Start `batch` ((n,) IOCTX_DTYPE, copied). What has not started by `deadline` (time.monotonic() seconds) ends
        with -ETIMEDOUT. `hold` is referenced until the last IOCTX is done, so that its memory stays alive."""

    def wait(self, ticket: Ticket, timeout: float) -> Results:
        """Wait at most `timeout` seconds. (n,) int32: bytes moved (always the full length) or -errno; -EINPROGRESS =
        not done, its memory belongs to the engine: call again, or leave buffer and slot in quarantine until then."""

    def cancel(self, ticket: Ticket) -> None:
        """What has not started ends with -ECANCELED; what has, ends by itself."""

    def close(self, timeout: float) -> bool:
        """Drain for at most `timeout` seconds, then end what has not started with -ECANCELED, and stop. False when I/O
        is still in flight: its memory must stay mapped. Idempotent."""


@runtime_checkable
class Registering(Protocol):
    """An engine that reads into memory which the CPU does not reach, once it was told of it."""

    def register(self, address: int, size: int) -> None:
        """Before the first batch that names it; until `close`. EngineError when it is not taken."""


@runtime_checkable
class Straight(Protocol):
    """An engine that can read into memory beside staging, where the bytes are wanted in the end."""

    def reaches(self, rows: Addresses, sizes: npt.NDArray[np.int64]) -> bool:
        """Whether IOCTX may name these (n, t) addresses, for (t,) bytes each."""
