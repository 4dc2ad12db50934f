"""The CPU twin: threads of the host that carry out IOCBs by the kernel's own code."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tutti_sglang.gio import abi
from tutti_sglang.gio.rings import FOREVER_NS, IocbRing


class Bell:
    """Rung when IOCBs have become complete; any number of twins may share one."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native
        self.handle = native.gio_bell_new()

    def ring(self) -> None:
        """Wake who waits."""
        self._native.gio_bell_ring(self.handle)

    def count(self) -> int:
        """How often it has been rung."""
        return int(self._native.gio_bell_count(self.handle))

    def wait(self, seen: int, timeout: float) -> int:
        """Wait, without the GIL, until the count is not `seen`, at most `timeout` seconds. Returns the count."""
        return int(self._native.gio_bell_wait(self.handle, seen, max(0, round(timeout * 1e9))))

    def close(self) -> None:
        """Nobody may ring or wait any more."""
        self._native.gio_bell_delete(self.handle)


class Endpoint(Protocol):
    """What is behind queue pairs and is woken when there are new commands: a software controller, a relay."""

    @property
    def endpoint(self) -> int:
        """The native one."""


class Pace(NamedTuple):
    """`window`: sub-I/Os in flight at once, of all `workers` threads; `poll_seconds`: how often these look for answers
    that nobody rings for, as those of a drive."""

    window: int = 32
    workers: int = 1
    poll_seconds: float = 5e-3


class Twin:
    """Carries out the IOCBs of `ring`; the Mover that needs no GPU."""

    def __init__(
        self,
        native: ctypes.CDLL,
        ring: IocbRing,
        endpoints: Sequence[Endpoint],
        bell: Bell,
        pace: Pace = Pace(),  # noqa: B008
    ) -> None:
        """Close controllers before the twin, relays after it."""
        self._native, self._ring = native, ring
        options = np.array([(round(pace.poll_seconds * 1e9), pace.workers, pace.window)], dtype=abi.TWIN_DTYPE)
        handles = (ctypes.c_void_p * len(endpoints))(*(each.endpoint for each in endpoints))
        self._handle = native.gio_twin_new(
            ring.context.ctypes.data, options.ctypes.data, handles, len(endpoints), bell.handle
        )
        ring.mover = self

    def launch(self, first: int, count: int, pieces: int, event: Any = None, sms: int = 0) -> None:
        """As Mover.launch; there are neither events nor SMs."""
        for iocb in range(first, first + count):
            self.issue(iocb % self._ring.depth)

    def issue(self, iocb: int, klass: int = 0, deadline_ns: int = FOREVER_NS) -> None:
        """Start one IOCB, smaller classes first. What has not begun by `deadline_ns` of CLOCK_MONOTONIC ends with
        -ETIMEDOUT."""
        self._native.gio_twin_issue(self._handle, iocb, klass, deadline_ns)

    def cancel(self, iocb: int) -> None:
        """End with -ECANCELED what has not begun of an IOCB, before this returns."""
        if self._handle:
            self._native.gio_twin_cancel(self._handle, iocb)

    def refuse(self, offset: int, size: int) -> None:
        """End with -EBADF what has not begun on these bytes of the drive, before this returns."""
        if self._handle:
            self._native.gio_twin_refuse(self._handle, offset, size)

    def reap(self) -> None:
        """As Mover.reap; the threads do it."""

    def stop(self, timeout: float) -> bool:
        """End with -ECANCELED what has no command yet, and stop; commands stay out, and nobody looks for their answers.
        False: a thread did not stop in time."""
        return not self._handle or bool(self._native.gio_twin_stop(self._handle, round(timeout * 1e9)))

    def close(self, timeout: float) -> bool:
        """Stop, and be gone. False: a thread did not stop in time."""
        if not self.stop(timeout):
            return False
        if self._handle:
            self._native.gio_twin_delete(self._handle)
            self._handle = None
        return True
