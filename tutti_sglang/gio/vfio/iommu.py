"""The memory that devices of this process may touch, and the devices in it: one address space for all of them.

Two ways to the kernel: a container of groups (type1, every kernel), or a device file and iommufd (Linux 6.6 and newer,
where it was built in)."""

import ctypes
import errno
import fcntl
import os
from typing import Protocol

from tutti_sglang.errors import EngineError
from tutti_sglang.gio.vfio import ioctls, pci
from tutti_sglang.gio.vfio.iova import IovaSpace
from tutti_sglang.memory import PAGE
from tutti_sglang.units import align_up, format_size

CONTAINER = "/dev/vfio/vfio"
IOMMUFD = "/dev/iommu"

_INFO_SIZE = 4096  # of VFIO_IOMMU_GET_INFO with all capabilities


class Way(Protocol):
    """How the kernel is asked."""

    name: str

    def open(self, function: pci.Function) -> int:
        """A descriptor of the device, which now sees the mapped memory. OSError, EngineError."""

    def ranges(self) -> list[tuple[int, int]]:
        """First and last address of each range of usable bus addresses, once a device is there. OSError."""

    def map(self, address: int, size: int, bus: int) -> None:
        """OSError."""

    def unmap(self, bus: int, size: int) -> None:
        """OSError."""

    def close(self) -> None:
        """Unmap everything."""


class AddressSpace:
    """One for all drives of a process: memory is pinned once and every device sees it at the same bus address."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self._free: IovaSpace | None = None
        self._devices = 0
        self._mapped: dict[tuple[int, int], tuple[int, int]] = {}  # address, size → bus, users

    def open(self, address: str) -> int:
        """A descriptor of the function at a PCI address, bound to VFIO and used by nobody. EngineError says what is in
        the way."""
        function = pci.look(address)
        problem = function.problem()
        if problem:
            raise EngineError(problem)
        try:
            fd = self.way.open(function)
        except OSError as error:
            raise _explain(error, function, self.way.name) from error
        self._devices += 1
        return fd

    @property
    def unused(self) -> bool:
        """Whether no device is in it."""
        return not self._devices

    def map(self, address: int, size: int) -> int:
        """Pin memory, which starts on a multiple of 4 KiB, and let all devices read and write it; what is mapped
        already is not pinned twice. Its bus address. EngineError."""
        assert address % PAGE == 0
        size = align_up(size, PAGE)
        bus, users = self._mapped.get((address, size), (0, 0))
        if not users:
            bus = self._map(address, size)
        self._mapped[address, size] = bus, users + 1
        return bus

    def unmap(self, address: int, size: int) -> None:
        """The counterpart of `map`. What devices then still do to the memory is a fault, and changes nothing."""
        key = address, align_up(size, PAGE)
        bus, users = self._mapped.pop(key)
        if users > 1:
            self._mapped[key] = bus, users - 1
        else:
            self.way.unmap(bus, key[1])

    def _map(self, address: int, size: int) -> int:
        if self._free is None:
            self._free = IovaSpace(self.way.ranges())
        bus = self._free.take(size)
        if bus is None:
            raise EngineError(f"The IOMMU has no room for {format_size(size)}")
        try:
            self.way.map(address, size, bus)
        except OSError as error:
            hint = "Raise `ulimit -l`, or lower staging_size" if error.errno == errno.ENOMEM else ""
            raise EngineError(f"The IOMMU does not map {format_size(size)} ({error.strerror})", hint) from error
        return bus

    def release(self, fd: int) -> None:
        """Close a device; with the last one the space is gone."""
        os.close(fd)
        self._devices -= 1
        if self.unused:
            self.way.close()


def address_space() -> AddressSpace:
    """By containers, which every kernel with VFIO has; by iommufd where it has no containers. EngineError."""
    if os.path.exists(CONTAINER):
        return AddressSpace(Container())
    if os.path.exists(IOMMUFD):
        return AddressSpace(Iommufd())
    raise EngineError("This kernel has no VFIO, or it is not loaded", "Run as root: modprobe vfio-pci")


class Container:
    """The way by groups: /dev/vfio/vfio and /dev/vfio/GROUP."""

    name = "type1"

    def __init__(self) -> None:
        """EngineError."""
        self._container = _open(CONTAINER)
        if ioctls.call_value(self._container, ioctls.VFIO_GET_API_VERSION) != ioctls.VFIO_API_VERSION:
            raise EngineError("This kernel speaks another VFIO than ours")
        self._groups: dict[str, int] = {}

    def open(self, function: pci.Function) -> int:
        """As Way.open."""
        if function.group not in self._groups:
            self._groups[function.group] = self._join(function)
        name = ctypes.create_string_buffer(function.address.encode())
        return ioctls.call_pointer(self._groups[function.group], ioctls.VFIO_GROUP_GET_DEVICE_FD, name)

    def ranges(self) -> list[tuple[int, int]]:
        """As Way.ranges."""
        buffer = ctypes.create_string_buffer(_INFO_SIZE)
        info = ioctls.Type1Info.from_buffer(buffer)
        info.argsz = _INFO_SIZE
        fcntl.ioctl(self._container, ioctls.VFIO_IOMMU_GET_INFO, buffer)
        return iova_ranges(bytes(buffer))

    def map(self, address: int, size: int, bus: int) -> None:
        """As Way.map."""
        flags = ioctls.VFIO_DMA_MAP_FLAG_READ | ioctls.VFIO_DMA_MAP_FLAG_WRITE
        request = ioctls.DmaMap(flags=flags, vaddr=address, iova=bus, size=size)
        ioctls.call(self._container, ioctls.VFIO_IOMMU_MAP_DMA, request)

    def unmap(self, bus: int, size: int) -> None:
        """As Way.unmap."""
        ioctls.call(self._container, ioctls.VFIO_IOMMU_UNMAP_DMA, ioctls.DmaUnmap(iova=bus, size=size))

    def close(self) -> None:
        """As Way.close."""
        for group in self._groups.values():
            os.close(group)
        os.close(self._container)
        self._groups = {}

    def _join(self, function: pci.Function) -> int:
        group = _open(f"/dev/vfio/{function.group}")
        try:
            status = ioctls.GroupStatus()
            ioctls.call(group, ioctls.VFIO_GROUP_GET_STATUS, status)
            if not status.flags & ioctls.VFIO_GROUP_FLAGS_VIABLE:
                raise EngineError(f"Another device of IOMMU group {function.group} still has its driver", _LIST_GROUP)
            first = not self._groups
            ioctls.call_pointer(group, ioctls.VFIO_GROUP_SET_CONTAINER, ctypes.c_int32(self._container))
            if first:
                ioctls.call_value(self._container, ioctls.VFIO_SET_IOMMU, ioctls.VFIO_TYPE1v2_IOMMU)
        except BaseException:
            os.close(group)
            raise
        return group


class Iommufd:
    """The way by device files: /dev/iommu and /dev/vfio/devices/vfioN."""

    name = "iommufd"

    def __init__(self) -> None:
        """EngineError."""
        self._iommu = _open(IOMMUFD)
        space = ioctls.IoasAlloc()
        ioctls.call(self._iommu, ioctls.IOMMU_IOAS_ALLOC, space)
        self._space = int(space.out_ioas_id)

    def open(self, function: pci.Function) -> int:
        """As Way.open."""
        if not function.cdev:
            raise EngineError(
                f"{function.address} has no file below /dev/vfio/devices", "The kernel lacks VFIO_DEVICE_CDEV"
            )
        device = _open(f"/dev/vfio/devices/{function.cdev}")
        try:
            ioctls.call(device, ioctls.VFIO_DEVICE_BIND_IOMMUFD, ioctls.BindIommufd(iommufd=self._iommu))
            ioctls.call(device, ioctls.VFIO_DEVICE_ATTACH_IOMMUFD_PT, ioctls.AttachPageTable(pt_id=self._space))
        except BaseException:
            os.close(device)
            raise
        return device

    def ranges(self) -> list[tuple[int, int]]:
        """As Way.ranges."""
        room = (ioctls.IovaRange * 64)()
        request = ioctls.IoasIovaRanges(ioas_id=self._space, num_iovas=len(room), allowed_iovas=ctypes.addressof(room))
        ioctls.call(self._iommu, ioctls.IOMMU_IOAS_IOVA_RANGES, request)
        return [(int(each.start), int(each.last)) for each in room[: request.num_iovas]]

    def map(self, address: int, size: int, bus: int) -> None:
        """As Way.map."""
        flags = ioctls.IOMMU_IOAS_MAP_FIXED_IOVA | ioctls.IOMMU_IOAS_MAP_WRITEABLE | ioctls.IOMMU_IOAS_MAP_READABLE
        request = ioctls.IoasMap(flags=flags, ioas_id=self._space, user_va=address, length=size, iova=bus)
        ioctls.call(self._iommu, ioctls.IOMMU_IOAS_MAP, request)

    def unmap(self, bus: int, size: int) -> None:
        """As Way.unmap."""
        request = ioctls.IoasUnmap(ioas_id=self._space, iova=bus, length=size)
        ioctls.call(self._iommu, ioctls.IOMMU_IOAS_UNMAP, request)

    def close(self) -> None:
        """As Way.close."""
        os.close(self._iommu)


_LIST_GROUP = "See what shares it: ls /sys/kernel/iommu_groups/*/devices"


def iova_ranges(info: bytes) -> list[tuple[int, int]]:
    """The usable bus addresses in the answer to VFIO_IOMMU_GET_INFO; all of 39 bits, which every IOMMU has, from
    kernels that do not tell (before 5.4)."""
    head = ioctls.Type1Info.from_buffer_copy(info)
    at = head.cap_offset if head.flags & ioctls.VFIO_IOMMU_INFO_CAPS else 0
    while at:
        capability = ioctls.CapHeader.from_buffer_copy(info, at)
        if capability.id == ioctls.VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE:
            body = at + ctypes.sizeof(ioctls.CapHeader)
            count = ctypes.c_uint32.from_buffer_copy(info, body).value
            ranges = (ioctls.IovaRange * count).from_buffer_copy(info, body + 8)
            return [(int(each.start), int(each.last)) for each in ranges]
        at = capability.next
    return [(0, (1 << 39) - 1)]


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise EngineError(
            f"{path} may not be opened by user {os.geteuid()}", f"Run as root: chown $USER {path}"
        ) from error


def _explain(error: OSError, function: pci.Function, way: str) -> EngineError:
    path = f"/dev/vfio/{function.group}" if way == Container.name else f"/dev/vfio/devices/{function.cdev}"
    if error.errno == errno.EBUSY:
        owners = " and ".join(pci.holders(path)) or "another process"
        return EngineError(
            f"{function.address} is driven by process {owners}, and one process owns a controller",
            "Give each process (each rank: {rank} in storage_dirs) a drive of its own",
        )
    return EngineError(f"{function.address} cannot be opened through {path} ({error.strerror})", "Run: tutti doctor")
