"""The mover whose drives write into device memory: GPUDirect Storage.

A layer comes in pieces through a bounded staging on the device. For each piece the drives write whole blocks there, a
kernel scatters them into the paged slots and sums the very bytes it moves, and the sums go to the host, where the store
compares them with its own: nothing of a layer counts before. The thread that does this waits for each piece.

What was read ahead lies in pinned host memory and is moved as by the stream mover.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_sglang import checksum
from tutti_sglang.checksum import BLOCK, Sums
from tutti_sglang.engine.plan import object_addresses, tensor_addresses
from tutti_sglang.errors import EngineError
from tutti_sglang.geometry import padded
from tutti_sglang.integration.direct.movers import Read, Reads, StreamMover
from tutti_sglang.integration.direct.pools import DevicePool
from tutti_sglang.kernels import gds
from tutti_sglang.kernels.pack import Pack
from tutti_sglang.kernels.streams import PoolStream
from tutti_sglang.memory import Addresses, Region
from tutti_sglang.store import Started
from tutti_sglang.units import align_up, format_size

PAGE_LAYERS = 256
"""What the staging holds: so many times all tensors that one layer has of one page, of the largest layer."""

LANES = 4
"""Pieces under way at once: what one holds is scattered while the drives fill the others."""

ALIGNMENT = 64 << 10
"""Of device memory, as cuFile maps it."""


@dataclass(frozen=True)
class Staging:
    """Device memory as bytes, cut into lanes; `lanes`: the address of each."""

    memory: torch.Tensor
    lanes: tuple[int, ...]
    lane_bytes: int


@dataclass(frozen=True)
class Device:
    """What pieces pass: the staging, the stream that empties it, and what moves the pages of each pool."""

    staging: Staging
    stream: PoolStream
    packs: dict[str, Pack]


def staging_of(pools: Iterable[DevicePool], device: torch.device) -> Staging:
    """For PAGE_LAYERS page-layers of these pools. EngineError when the device has no room for it."""
    sizes = [
        int(padded(pool.view.maps[0].sizes[tensors]).sum())
        for pool in pools
        for tensors in pool.layers
        if tensors.stop > tensors.start
    ]
    lane = align_up(PAGE_LAYERS // LANES * max(sizes), ALIGNMENT)
    try:
        memory = torch.empty(LANES * lane + ALIGNMENT, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        size = format_size(LANES * lane)
        raise EngineError(f"{device} has no {size} left for staging", "Lower --mem-fraction-static") from error
    first = -memory.data_ptr() % ALIGNMENT
    memory = memory[first : first + LANES * lane]
    return Staging(memory, tuple(memory.data_ptr() + lane * number for number in range(LANES)), lane)


class GdsMover(StreamMover):
    """Pages that were not read ahead come by GPUDirect Storage, the others as by the stream mover."""

    fetches = True
    engine = "gds"

    def __init__(
        self, pools: Iterable[DevicePool], device: torch.device, forward_stream: Any = None, mode: str = ""
    ) -> None:
        """On a thread whose CUDA context is that of the pools. `mode`: of cuFile, to be printed. EngineError when what
        it is made of does not work here."""
        pools = list(pools)
        super().__init__(pools, device, forward_stream)
        staging = staging_of(pools, device)
        self._way, size = Device(staging, self._loads, self._packs), staging.memory.numel()
        self.memory = ((staging.lanes[0], size),)
        self.name = f"gds ({device}: {mode}, {format_size(size)} of staging there; staged pages as by stream)"
        for pool in pools:
            self._try_landing(pool)
        library = gds.CuFile()
        try:
            library.register_memory(*self.memory[0])
            library.forget_memory(self.memory[0][0])
        finally:
            library.close()

    def reads(self) -> Reads:
        """By way of the staging on the device."""
        return DeviceReads(self._way)

    def _try_landing(self, pool: DevicePool) -> None:
        """Bring page 0, which is nobody's, one layer by way of the staging; the device's sums must be the host's."""
        tensors = next(each for each in pool.layers if each.stop > each.start)
        sizes = np.array(pool.view.maps[0].sizes[tensors])
        region = Region(int(sizes.sum()))
        region.view[:] = np.random.default_rng(0).integers(256, size=region.size, dtype=np.uint8)
        source = tensor_addresses(object_addresses(region.address, 1, region.size), sizes)
        page, first = torch.zeros(1, dtype=torch.int64, device=self._device), np.zeros(1, np.int64)
        self._loads.follow()
        rows = DeviceRows(self._way, pool, page, tensors, self._way.staging.lanes[0])
        rows.copy(first, source, sizes)
        found, wanted = rows.landed(first, sizes, summed=True), checksum.sums(source, sizes)
        region.close()
        if not (found == wanted).all():
            raise EngineError(f"{self._device} makes other sums of the same bytes")


class DeviceReads:
    """The protocol is Reads. Pieces wait for a lane in their order, across pools and layers: all that were begun before
    one have ended when it does, so it has a lane then."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free = deque(device.staging.lanes)
        self._waiting: deque[_Piece] = deque()

    def begin(self, read: Read, tensors: slice, deadline: float) -> Any:
        """As Reads.begin."""
        sizes = read.pool.view.maps[0].sizes[tensors]
        step = self._device.staging.lane_bytes // int(padded(sizes).sum())
        firsts = range(0, read.pages, step)
        pieces = [_Piece(read, tensors, first, min(step, read.pages - first), deadline) for first in firsts]
        self._waiting.extend(pieces)
        self._start()
        return pieces

    def end(self, begun: Any) -> bool:
        """As Reads.end."""
        found = [self._end(piece) for piece in begun]  # all of them, for the sake of their lanes
        return all(found)

    def _start(self) -> None:
        while self._waiting and self._free:
            piece = self._waiting.popleft()
            piece.lane = self._free.popleft()
            pages = piece.read.slots[piece.first : piece.first + piece.count]
            rows = DeviceRows(self._device, piece.read.pool, pages, piece.tensors, piece.lane)
            piece.started = piece.read.layers.begin(piece.tensors, rows, piece.deadline, piece.first)

    def _end(self, piece: "_Piece") -> bool:
        assert piece.lane
        found = piece.read.layers.end(piece.started, piece.count)
        self._free.append(piece.lane)
        self._start()
        return bool(found.all())


@dataclass(eq=False)
class _Piece:
    """The tensors of `count` pages of a read, from `first` on. `lane`: where they land, 0 as long as there is none."""

    read: Read
    tensors: slice
    first: int
    count: int
    deadline: float
    lane: int = 0
    started: Started | None = None


class DeviceRows:
    """Rows in a lane of the staging, of pages that are wanted in slots of the device. The protocol is store.Target."""

    padded, reached = True, False

    def __init__(self, device: Device, pool: DevicePool, pages: torch.Tensor, tensors: slice, lane: int) -> None:
        """`pages`: (m,) numbers on the device; the lane has room for these tensors of them."""
        self._memory, self._stream, self._pack = device.staging.memory, device.stream, device.packs[pool.name]
        self._pages, self._tensors = pages, tensors
        strides = padded(pool.view.maps[0].sizes[tensors])
        self.rows: Addresses = tensor_addresses(object_addresses(lane, len(pages), int(strides.sum())), strides)

    def copy(self, which: npt.NDArray[np.int64], source: Addresses, sizes: npt.NDArray[np.int64]) -> None:
        """As Target.copy."""
        self._stream.fill(self._memory, self.rows[which], source, sizes)
        self._scatter(which, sums=False)

    def landed(self, which: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], *, summed: bool) -> Sums:
        """As Target.landed."""
        blocks = self._scatter(which, sums=summed)
        if not summed:
            return np.empty((len(which), 0), np.uint64)
        columns = [
            checksum.finish(np.ascontiguousarray(blocks[:, tensor, : -(-size // BLOCK)]), size)
            for tensor, size in enumerate(sizes.tolist())
        ]
        return np.stack(columns, axis=1)

    def _scatter(self, which: npt.NDArray[np.int64], *, sums: bool) -> Sums:
        pages, source = self._stream.some(self._pages, which), self._stream.upload(self.rows[which])
        return self._stream.land(self._pack, pages, self._tensors, source, sums=sums)
