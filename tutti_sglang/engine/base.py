"""What every engine promises: a batch of I/O contexts in, one result for each out."""

from typing import Any, Protocol, runtime_checkable

from tutti_sglang.engine.batch import Batch, IoClass, Results, Ticket


@runtime_checkable
class Engine(Protocol):
    """Moves bytes between memory and the segment files of the drives.

    Thread safe. A batch may mix drives, segments, reads and writes; IOCTX of one batch are independent and complete
    in any order. An engine
    never raises for an I/O problem: it is a negative errno in that IOCTX's result. EngineError after close().
    """

    name: str

    def attach(self, drive: int, segment: int, fd: int) -> None:
        """Make the segment's file on `drive` known; `fd` stays the caller's and open until `detach` returned. Offsets
        of IOCTX
        divide by the engine's segment_size to find it; one that names an unknown file ends with -EBADF."""

    def detach(self, drive: int, segment: int) -> None:
        """Forget the file, once no I/O on it is in flight any more."""

    def submit(self, batch: Batch, klass: IoClass, deadline: float, hold: Any = None) -> Ticket:
        """Start `batch` ((n,) IOCTX_DTYPE, copied or kept until done). `deadline`: time.monotonic() seconds; what has
        not started by then
        ends with -ETIMEDOUT. `hold` is referenced until the last IOCTX is done, so that its memory stays alive."""

    def wait(self, ticket: Ticket, timeout: float) -> Results:
        """Wait at most `timeout` seconds. (n,) int32: bytes moved (always the full length) or -errno; -EINPROGRESS =
        not done, its memory still
        belongs to the engine: call again, or leave buffer and slot in quarantine until it is done."""

    def cancel(self, ticket: Ticket) -> None:
        """What has not started ends with -ECANCELED; what has, ends by itself."""

    def close(self, timeout: float) -> bool:
        """Drain for at most `timeout` seconds and stop; False when I/O is still in flight (its memory must stay
        mapped). Idempotent."""
