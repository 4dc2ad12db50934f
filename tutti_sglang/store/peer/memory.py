"""The memory that objects pass through between this process and its worker: bounded, shared by the two, given out in
spans. A span that a worker may still write to is nobody's until the worker has answered or is dead."""

import mmap
import os
import threading
import time
from dataclasses import dataclass

import numpy as np

from tutti_sglang.engine.staging import FreeRanges
from tutti_sglang.errors import StoreError
from tutti_sglang.memory import PAGE
from tutti_sglang.units import align_up, format_size


@dataclass(frozen=True, slots=True)
class Span:
    """`size` bytes at `offset`."""

    offset: int
    size: int


class SharedMemory:
    """Thread safe. `fd`: for the worker to map; `address`: where it lies in this process."""

    def __init__(self, size: int) -> None:
        """StoreError when the system refuses it."""
        self.size = align_up(size, PAGE)
        try:
            self.fd = os.memfd_create("tutti-peer", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, self.size)
            mapped = mmap.mmap(self.fd, self.size)
        except OSError as error:
            raise StoreError(f"peer: no {format_size(size)} of shared memory: {error}", "Lower peer.memory") from error
        self._view = np.frombuffer(mapped, dtype=np.uint8)
        self.address = self._view.ctypes.data
        self._changed = threading.Condition()
        self._free = FreeRanges(self.size)
        self.used = 0

    def take(self, nbytes: int, deadline: float, *, spare: int = 0) -> Span | None:
        """Waits until `deadline` for `nbytes`; None when they do not come free. `spare`: bytes to leave to others."""
        size = align_up(nbytes, PAGE)
        if size + spare > self.size:
            return None
        with self._changed:
            while True:
                start = self._free.take(size) if self.used + size + spare <= self.size else None
                if start is not None:
                    self.used += size
                    return Span(start, size)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return None

    def give(self, span: Span) -> None:
        """Give it back."""
        with self._changed:
            self._free.give(span.offset, span.size)
            self.used -= span.size
            self._changed.notify_all()

    def close(self) -> None:
        """The memory goes with the last array over it."""
        os.close(self.fd)
        self._view = np.empty(0, dtype=np.uint8)
