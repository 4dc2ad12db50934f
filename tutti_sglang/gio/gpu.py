"""The GPU as the mover: its memory, and the kernels launched on a stream that owns a number of SMs.

Written for `make gpu`; nothing here is imported without a CUDA device.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from cuda.core import ContextOptions, Device, LaunchConfig, SMResourceOptions, Stream, launch

from tutti_sglang.errors import EngineError
from tutti_sglang.gio.rings import IocbRing
from tutti_sglang.kernels import gdrcopy, gio_uring
from tutti_sglang.memory import Region
from tutti_sglang.units import align_up

THREADS = 64  # per block: two warps, so that even a small batch spreads over several SMs

_REGISTER_FLAGS = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver. Raises EngineError with the name of what went wrong."""
    error, *values = function(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(f"{function.__name__} failed: {error.name}")
    return values[0] if values else None


class CudaMemory:
    """Memory for kernels: shared = pinned and mapped host memory, local and constant = HBM. See queues.Memory.

    `hbm_iocbs`: IOCB rings lie in HBM, and the CPU writes them through GDRCopy.
    """

    def __init__(self, device: Device, hbm_iocbs: bool = False) -> None:
        self.device, self._hbm_iocbs = device, hbm_iocbs
        device.set_current()
        self._regions: list[Region] = []
        self._registers: list[int] = []
        self._mappings: list[gdrcopy.Mapping] = []
        self._allocations: list[Any] = []

    def shared(self, size: int) -> Region:
        """As Memory.shared."""
        return self.register(Region(size))

    def iocbs(self, size: int) -> "Region | gdrcopy.Mapping":
        """As Memory.iocbs."""
        if not self._hbm_iocbs:
            return self.shared(size)
        room = self.local(gdrcopy.padded(size) + gdrcopy.GPU_PAGE)
        self._mappings.append(gdrcopy.Mapping(align_up(room, gdrcopy.GPU_PAGE), size))
        return self._mappings[-1]

    def register(self, region: Region) -> Region:
        """Pin host memory and map it under its own address. Raises EngineError where the GPU would see another."""
        _call(driver.cuMemHostRegister, region.address, region.size, _REGISTER_FLAGS)
        self._regions.append(region)
        seen = int(_call(driver.cuMemHostGetDevicePointer, region.address, 0))
        if seen != region.address:
            raise EngineError("This GPU sees host memory under other addresses than the CPU does")
        return region

    def registers(self, address: int, size: int) -> int | None:
        """Where kernels see a drive's registers, which this process has mapped at `address`; None where the driver maps
        no I/O memory of other devices: then a relay rings the drive's doorbells."""
        flags = _REGISTER_FLAGS | driver.CU_MEMHOSTREGISTER_IOMEMORY
        error, *_ = driver.cuMemHostRegister(address, size, flags)
        if error != driver.CUresult.CUDA_SUCCESS:
            return None
        self._registers.append(address)
        return int(_call(driver.cuMemHostGetDevicePointer, address, 0))

    def local(self, size: int) -> int:
        """As Memory.local."""
        allocation = _call(driver.cuMemAlloc, size)
        self._allocations.append(allocation)
        _call(driver.cuMemsetD8, allocation, 0, size)
        return int(allocation)

    def constant(self, content: npt.NDArray[np.void]) -> int:
        """As Memory.constant."""
        address = self.local(max(1, content.nbytes))
        if content.nbytes:
            kept = np.ascontiguousarray(content)
            _call(driver.cuMemcpyHtoD, address, kept.ctypes.data, kept.nbytes)
        return address

    def flush(self) -> None:
        """As Memory.flush."""
        for mapping in self._mappings:
            mapping.flush()

    def read(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        """(size,) a copy of HBM."""
        copy = np.empty(size, dtype=np.uint8)
        _call(driver.cuMemcpyDtoH, copy.ctypes.data, address, size)
        return copy

    def close(self) -> None:
        """Give everything back, when no kernel and no controller can touch it any more."""
        self.device.sync()
        for mapping in self._mappings:
            mapping.close()
        for region in self._regions:
            _call(driver.cuMemHostUnregister, region.address)
            region.close()
        for address in self._registers:
            _call(driver.cuMemHostUnregister, address)
        for allocation in self._allocations:
            _call(driver.cuMemFree, allocation)
        self._mappings, self._regions, self._registers, self._allocations = [], [], [], []


class GpuMover:
    """Carries out the IOCBs of `ring` by kernels; see rings.Mover.

    `wake`: called at each launch, for controllers that sleep when idle.
    """

    def __init__(self, ring: IocbRing, device: Device, wake: Callable[[], None] = lambda: None) -> None:
        self._ring, self._device, self._wake = ring, device, wake
        self.architecture = f"sm_{device.arch}"
        code = gio_uring.compile_kernels(self.architecture).code
        self._kernel, self._reap, self._abort = (code.get_kernel(name) for name in gio_uring.KERNELS)
        self._streams: dict[int, tuple[Stream, int, Any]] = {}
        self._running: list[Any] = []
        ring.mover = self

    def stream(self, sms: int) -> tuple[Stream, int]:
        """The stream of at least `sms` SMs (0: of the whole GPU), and how many it has: SMs are split by groups."""
        if sms not in self._streams:
            self._streams[sms] = self._make_stream(sms)
        stream, granted, _ = self._streams[sms]
        return stream, granted

    def launch(self, first: int, count: int, pieces: int, event: Any, sms: int) -> None:
        """As Mover.launch; `event`: of cuda.core."""
        stream, _ = self.stream(sms)
        if event is not None:
            stream.wait(event)
        config = LaunchConfig(grid=(-(-pieces // THREADS), count), block=THREADS)
        launch(stream, config, self._kernel, np.uint64(self._ring.context_address), np.uint32(first))
        self._running = [each for each in self._running if not each.is_done] + [stream.record()]
        self._wake()

    def reap(self) -> None:
        """As Mover.reap: by a small kernel, once all others have ended."""
        if any(not each.is_done for each in self._running):
            return
        stream, _ = self.stream(0)
        grid = (-(-self._ring.most_queues // THREADS), len(self._ring.mdts))
        launch(stream, LaunchConfig(grid=grid, block=THREADS), self._reap, np.uint64(self._ring.context_address))
        stream.sync()

    def abort(self, drive: int) -> None:
        """End every command of `drive` after its controller was reset, and make its queue pairs as new."""
        stream, _ = self.stream(0)
        self.sync()
        config = LaunchConfig(grid=-(-self._ring.most_queues // THREADS), block=THREADS)
        launch(stream, config, self._abort, np.uint64(self._ring.context_address), np.uint32(drive))
        stream.sync()

    def sync(self) -> None:
        """Wait for all kernels."""
        for stream, _, _ in self._streams.values():
            stream.sync()

    def close(self) -> None:
        """Wait for all kernels and give the streams back."""
        self.sync()
        for stream, _, context in self._streams.values():
            stream.close()
            if context is not None:
                with contextlib.suppress(RuntimeError):
                    context.close()
        self._streams = {}

    def _make_stream(self, sms: int) -> tuple[Stream, int, Any]:
        """A stream, the SMs it has, and the green context that it belongs to."""
        whole = self._device.resources.sm
        if not sms:
            return self._device.create_stream(), whole.sm_count, None
        count = align_up(max(sms, whole.min_partition_size), whole.coscheduled_alignment)
        groups, _ = whole.split(SMResourceOptions(count=count))
        context = self._device.create_context(ContextOptions(resources=[groups[0]]))
        return context.create_stream(), groups[0].sm_count, context
