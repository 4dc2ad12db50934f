"""Who carries bytes between host memory and the slots of a device pool; of some movers also between drives and slots.

What was read ahead lies in host memory and was verified there; the last step, host memory → slots, is a mover's. One
that is asynchronous only enqueues it on a stream of its own, so that all layers are on their way before the forward
pass is launched; of any other, a thread waits for the copies, layer by layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tutti_sglang import memory
from tutti_sglang.integration.direct.pools import DevicePool
from tutti_sglang.kernels import streams
from tutti_sglang.kernels.pack import Paged
from tutti_sglang.memory import Addresses, Region
from tutti_sglang.store import HostRows, Layers
from tutti_sglang.units import align_up

Slots = Any
"""The pages of a pool in the mover's own form, made once for a load."""

Source = Any
"""Addresses of host memory in the mover's own form, made once for a load."""


class Mark(Protocol):
    """A point in a mover's work."""

    def wait(self) -> None:
        """What the caller's stream (or thread) does next, comes after it."""

    def done(self) -> bool:
        """Whether it is over, without waiting. Host memory that it reads may be reused then."""


@dataclass(frozen=True, eq=False)
class Read:
    """`pages` pages of a pool whose tensors come from the drives, by open reads of as many objects."""

    pool: DevicePool
    layers: Layers
    slots: Slots
    pages: int


class Reads(Protocol):
    """What a batch reads from the drives. On one thread; what is begun is ended in the same order, or no more `end`
    follows and all `layers` are closed."""

    def begin(self, read: Read, tensors: slice, deadline: float) -> Any:
        """Start it as far as there is room: drives may write from now on."""

    def end(self, begun: Any) -> bool:
        """Whether all of it is in its slots, as it was put. No drive writes for it after this."""


class Mover(Protocol):
    """Pages are whole; `tensors` are the consecutive tensors of a page that are meant, t of them."""

    name: str
    asynchronous: bool
    reaches: bool
    """Whether the CPU, and so a copy out of a read, reaches the slots by their addresses."""
    fetches: bool
    """Whether pages that were not read ahead come too: from the drives, layer by layer, by `reads`."""
    engine: str
    """What the setting `engine` must be for it; empty: anything."""
    memory: tuple[tuple[int, int], ...]
    """Addresses and bytes of device memory that drives must reach."""

    def reads(self) -> Reads:
        """For a batch. Only if it `fetches`."""

    def register(self, address: int, size: int) -> None:
        """Host memory that `put` and `take` will be given. Before its first use. EngineError when it cannot be had."""

    def begin(self) -> None:
        """A load begins: its slots may have been others' until now, whose kernels are on the streams that SGLang uses.
        On the scheduler thread."""

    def slots(self, pool: DevicePool, indices: torch.Tensor, pages: int) -> Slots:
        """Token slots of `pages` whole pages, as SGLang's allocator gave them. On the scheduler thread."""

    def rows(self, pool: DevicePool, slots: Slots) -> Addresses:
        """(n, T) addresses of the pages' tensors. Only if it `reaches` them; else all goes through host memory."""

    def source(self, rows: Addresses) -> Source:
        """(n, T) addresses for `put`. After `begin`."""

    def put(self, pool: DevicePool, slots: Slots, tensors: slice, source: Source) -> Mark:
        """Host memory → slots. The memory stays as it is until the mark is done."""

    def take(self, pool: DevicePool, indices: torch.Tensor, target: Addresses) -> None:
        """Whole pages → host memory, (n, T) addresses. Returns when the bytes are there. On the offload thread."""


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
    reaches = fetches = True
    engine = ""
    memory: tuple[tuple[int, int], ...] = ()

    def reads(self) -> Reads:
        """By way of the store's staging, or straight into the slots where the engine can."""
        return HostReads()

    def register(self, address: int, size: int) -> None:
        """Nothing: it is memory like any other."""

    def begin(self) -> None:
        """Nothing: what SGLang computes on the CPU is over when it calls."""

    def source(self, rows: Addresses) -> Source:
        """As they are."""
        return rows

    def slots(self, pool: DevicePool, indices: torch.Tensor, pages: int) -> Slots:
        """(n,) page numbers."""
        return pool.view.numbers(indices, pages)

    def rows(self, pool: DevicePool, slots: Slots) -> Addresses:
        """(n, T) addresses."""
        return pool.view.maps[0].rows(slots)

    def put(self, pool: DevicePool, slots: Slots, tensors: slice, source: Source) -> Mark:
        """One copy."""
        if len(slots):
            rows = pool.view.maps[0].rows(slots)[:, tensors]
            memory.copy_rows(rows, source[:, tensors], pool.view.maps[0].sizes[tensors])
        return DONE

    def take(self, pool: DevicePool, indices: torch.Tensor, target: Addresses) -> None:
        """One copy."""
        if len(target):
            rows = pool.view.maps[0].rows(pool.view.numbers(indices, len(target)))
            memory.copy_rows(target, rows, pool.view.maps[0].sizes)


class HostReads:
    """Into slots that the CPU reaches. The protocol is Reads."""

    def __init__(self) -> None:
        self._rows: dict[Read, Addresses] = {}

    def begin(self, read: Read, tensors: slice, deadline: float) -> Any:
        """As Reads.begin."""
        if read not in self._rows:
            self._rows[read] = read.pool.view.maps[0].rows(read.slots)
        return read, read.layers.begin(tensors, HostRows(self._rows[read][:, tensors]), deadline)

    def end(self, begun: Any) -> bool:
        """As Reads.end."""
        read, ahead = begun
        return bool(read.layers.end(ahead, read.pages).all())


class GioMover(HostMover):
    """The same memory, into which drives write what is not staged: by NVMe commands of gio_uring's protocol."""

    name = "gio (drives write into the pool's slots; staged pages are copied)"


class StreamMover:
    """Pools in device memory, and pinned host memory that its kernels read and write: one launch for each layer of all
    pages, on a stream of its own, with an event behind it that the forward pass waits for."""

    asynchronous = True
    reaches = fetches = False
    engine = ""
    memory: tuple[tuple[int, int], ...] = ()

    def __init__(
        self, pools: Iterable[DevicePool], device: torch.device, forward_stream: Any = None, why: str = ""
    ) -> None:
        """`why`: nothing better. EngineError when what it is made of does not work here."""
        pools = list(pools)
        self.name = f"stream ({device}: pinned host memory, one kernel for each layer)" + (f"; {why}" if why else "")
        self._device, self._forward = device, forward_stream
        self._loads, self._offloads = streams.PoolStream(device), streams.PoolStream(device)
        self._packs = {pool.name: self._loads.pack(_paged(pool)) for pool in pools}
        for pool in pools:
            self._try(pool)

    def reads(self) -> Reads:
        """There are none."""
        raise AssertionError("it brings only what was read ahead")

    @staticmethod
    def device_bytes(pages: int, tensors: int) -> int:
        """Of a load of so many pages of so many tensors, until its copies are over: page numbers and addresses."""
        return 8 * pages * (1 + tensors)

    def register(self, address: int, size: int) -> None:
        """Pin it."""
        streams.register(self._device, address, size)

    def begin(self) -> None:
        """Copies come after all that SGLang has enqueued."""
        self._loads.follow(self._forward)

    def slots(self, pool: DevicePool, indices: torch.Tensor, pages: int) -> Slots:
        """(n,) page numbers on the device."""
        return self._loads.pages(indices, pool.view.page_size)

    def rows(self, pool: DevicePool, slots: Slots) -> Addresses:
        """There are none."""
        raise AssertionError("the CPU does not reach the slots")

    def source(self, rows: Addresses) -> Source:
        """(n, T) on the device."""
        return self._loads.upload(rows)

    def put(self, pool: DevicePool, slots: Slots, tensors: slice, source: Source) -> Mark:
        """One launch."""
        return self._loads.scatter(self._packs[pool.name], slots, tensors, source)

    def take(self, pool: DevicePool, indices: torch.Tensor, target: Addresses) -> None:
        """One launch, waited for."""
        stream = self._offloads
        pages = stream.pages(indices, pool.view.page_size)
        stream.gather(self._packs[pool.name], pages, stream.upload(target))

    def _try(self, pool: DevicePool) -> None:
        sizes = np.array(pool.view.maps[0].sizes)
        strides = np.array([align_up(size, 64) for size in sizes.tolist()])
        offsets, page = np.cumsum(strides) - strides, int(strides.sum())
        region = Region(2 * page)
        self.register(region.address, region.size)
        rows = np.uint64(region.address) + np.array([[0], [page]], dtype=np.uint64) + offsets.astype(np.uint64)
        streams.check(self._loads, self._packs[pool.name], rows, sizes)
        streams.unregister(self._device, region.address)
        region.close()


def _paged(pool: DevicePool) -> list[Paged]:
    """A page's tensors, each one piece of memory, whatever the order of tokens and heads in it."""
    page_map = pool.view.maps[0]
    return [
        Paged(base, stride, 1, 0, 1, 0, size)
        for base, stride, size in zip(page_map.base, page_map.stride, page_map.sizes, strict=True)
    ]
