"""The CPU twin: threads of the host that carry out IOCBs by the kernel's own code."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import SoftwareController
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


class Twin:
    """Carries out the IOCBs of `ring`; the Mover that needs no GPU."""

    def __init__(
        self,
        native: ctypes.CDLL,
        ring: IocbRing,
        controllers: Sequence[SoftwareController],
        bell: Bell,
        *,
        window: int = 32,
        workers: int = 1,
    ) -> None:
        """`window`: sub-I/Os in flight at once, of all `workers` threads. Close the controllers before the twin."""
        self._native, self._ring = native, ring
        options = np.array([(round(5e6), workers, window)], dtype=abi.TWIN_DTYPE)
        handles = (ctypes.c_void_p * len(controllers))(*(controller.handle for controller in controllers))
        self._handle = native.gio_twin_new(
            ring.context.ctypes.data, options.ctypes.data, handles, len(controllers), bell.handle
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

    def close(self, timeout: float) -> bool:
        """End with -ECANCELED what has no command yet, and stop. False: a thread did not stop in time."""
        if self._handle:
            if not self._native.gio_twin_stop(self._handle, round(timeout * 1e9)):
                return False
            self._native.gio_twin_delete(self._handle)
            self._handle = None
        return True
