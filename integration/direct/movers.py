"""Who carries bytes between host memory and the slots of a device pool. Chosen once, by what the machine offers.

Drives are read into host memory and verified there; the last step, host memory → slots, is a mover's. One that is
asynchronous only enqueues it on a stream of its own, so that all layers are on their way before the forward pass is
launched; of any other, a thread waits for the copies, layer by layer.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from tutti_sglang import memory
from tutti_sglang.errors import UnsupportedError
from tutti_sglang.integration.direct.pools import DevicePool, is_reachable
from tutti_sglang.memory import Addresses

Slots = Any
"""The pages of a pool in the mover's own form, made once for a load."""


class Mark(Protocol):
    """A point in a mover's work."""

    def wait(self) -> None:
        """What the caller's stream (or thread) does next, comes after it."""

    def done(self) -> bool:
        """Whether it is over, without waiting. Host memory that it reads may be reused then."""


class Mover(Protocol):
    """Pages are whole; `tensors` are the consecutive tensors of a page that are meant, t of them."""

    name: str
    asynchronous: bool
    reaches: bool
    """Whether the CPU, and so a copy out of a read, reaches the slots by their addresses."""

    def register(self, address: int, size: int) -> None:
        """Host memory that `put` and `take` will be given. Before its first use, on any thread."""

    def slots(self, pool: DevicePool, indices: torch.Tensor, pages: int) -> Slots:
        """Token slots of `pages` whole pages, as SGLang's allocator gave them. On the scheduler thread."""

    def rows(self, pool: DevicePool, slots: Slots) -> Addresses:
        """(n, T) addresses of the pages' tensors. Only if it `reaches` them; else all goes through host memory."""

    def put(self, pool: DevicePool, slots: Slots, tensors: slice, source: Addresses) -> Mark:
        """Host memory → slots; `source`: (n, t) addresses, which stay as they are until the mark is done."""

    def take(self, pool: DevicePool, slots: Slots, tensors: slice, target: Addresses) -> None:
        """Slots → host memory, (n, t) addresses. Returns when the bytes are there."""


class _Done:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


DONE: Mark = _Done()


class HostMover:
    """Slots in memory that the CPU reaches: the CPU platform, the twin of peer-to-peer."""

    name = "host (the pool's memory is reached directly)"
    asynchronous = False
    reaches = True

    def register(self, address: int, size: int) -> None:
        """Nothing: it is memory like any other."""

    def slots(self, pool: DevicePool, indices: torch.Tensor, pages: int) -> Slots:
        """(n,) page numbers."""
        return pool.view.numbers(indices, pages)

    def rows(self, pool: DevicePool, slots: Slots) -> Addresses:
        """(n, T) addresses."""
        return pool.view.maps[0].rows(slots)

    def put(self, pool: DevicePool, slots: Slots, tensors: slice, source: Addresses) -> Mark:
        """One copy."""
        if len(slots):
            rows = pool.view.maps[0].rows(slots)[:, tensors]
            memory.copy_rows(rows, source, pool.view.maps[0].sizes[tensors])
        return DONE

    def take(self, pool: DevicePool, slots: Slots, tensors: slice, target: Addresses) -> None:
        """One copy."""
        if len(slots):
            rows = pool.view.maps[0].rows(slots)[:, tensors]
            memory.copy_rows(target, rows, pool.view.maps[0].sizes[tensors])


def choose_mover(pools: Iterable[DevicePool]) -> Mover:
    """The best mover for these pools on this machine. UnsupportedError says what is missing."""
    if all(map(is_reachable, pools)):
        return HostMover()
    raise UnsupportedError(
        "The direct path has no mover for device memory in this version",
        'Set "path": "host" in the extra config',
    )
