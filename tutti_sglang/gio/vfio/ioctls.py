"""The kernel's interface to devices in user space: numbers and structures of include/uapi/linux/vfio.h (Linux 6.1; the
device files of 6.6) and include/uapi/linux/iommufd.h (6.2). All of it is fixed ABI."""

import ctypes
import fcntl
from typing import Any

_TYPE = ord(";") << 8  # VFIO_TYPE and IOMMUFD_TYPE; the numbers carry neither size nor direction: _IO(';', n)
_BASE = _TYPE + 100  # VFIO_BASE

VFIO_API_VERSION = 0
VFIO_GET_API_VERSION = _BASE + 0
VFIO_SET_IOMMU = _BASE + 2
VFIO_GROUP_GET_STATUS = _BASE + 3
VFIO_GROUP_SET_CONTAINER = _BASE + 4
VFIO_GROUP_GET_DEVICE_FD = _BASE + 6
VFIO_DEVICE_GET_INFO = _BASE + 7
VFIO_DEVICE_GET_REGION_INFO = _BASE + 8
VFIO_DEVICE_RESET = _BASE + 11
VFIO_IOMMU_GET_INFO = _BASE + 12
VFIO_IOMMU_MAP_DMA = _BASE + 13
VFIO_IOMMU_UNMAP_DMA = _BASE + 14
VFIO_DEVICE_BIND_IOMMUFD = _BASE + 18
VFIO_DEVICE_ATTACH_IOMMUFD_PT = _BASE + 19

VFIO_TYPE1v2_IOMMU = 3
VFIO_GROUP_FLAGS_VIABLE = 1
VFIO_DEVICE_FLAGS_RESET = 1
VFIO_REGION_INFO_FLAG_MMAP = 1 << 2
VFIO_PCI_BAR0_REGION_INDEX = 0
VFIO_PCI_CONFIG_REGION_INDEX = 7
VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE = 1, 2
VFIO_IOMMU_INFO_CAPS = 2
VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE = 1

IOMMU_IOAS_ALLOC = _TYPE + 0x81
IOMMU_IOAS_IOVA_RANGES = _TYPE + 0x84
IOMMU_IOAS_MAP = _TYPE + 0x85
IOMMU_IOAS_UNMAP = _TYPE + 0x87
IOMMU_IOAS_MAP_FIXED_IOVA, IOMMU_IOAS_MAP_WRITEABLE, IOMMU_IOAS_MAP_READABLE = 1, 2, 4

_u32, _u64, _i32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32


class GroupStatus(ctypes.Structure):
    """struct vfio_group_status."""

    _fields_ = (("argsz", _u32), ("flags", _u32))


class DeviceInfo(ctypes.Structure):
    """struct vfio_device_info, as far as every kernel has it."""

    _fields_ = (("argsz", _u32), ("flags", _u32), ("num_regions", _u32), ("num_irqs", _u32))


class RegionInfo(ctypes.Structure):
    """struct vfio_region_info. `offset`: of the region in the device's file."""

    _fields_ = (
        ("argsz", _u32),
        ("flags", _u32),
        ("index", _u32),
        ("cap_offset", _u32),
        ("size", _u64),
        ("offset", _u64),
    )


class Type1Info(ctypes.Structure):
    """struct vfio_iommu_type1_info."""

    _fields_ = (("argsz", _u32), ("flags", _u32), ("iova_pgsizes", _u64), ("cap_offset", _u32), ("pad", _u32))


class CapHeader(ctypes.Structure):
    """struct vfio_info_cap_header. `next`: offset of the next one from the start of the information, 0 at the end."""

    _fields_ = (("id", ctypes.c_uint16), ("version", ctypes.c_uint16), ("next", _u32))


class DmaMap(ctypes.Structure):
    """struct vfio_iommu_type1_dma_map."""

    _fields_ = (("argsz", _u32), ("flags", _u32), ("vaddr", _u64), ("iova", _u64), ("size", _u64))


class DmaUnmap(ctypes.Structure):
    """struct vfio_iommu_type1_dma_unmap."""

    _fields_ = (("argsz", _u32), ("flags", _u32), ("iova", _u64), ("size", _u64))


class IovaRange(ctypes.Structure):
    """struct vfio_iova_range and struct iommu_iova_range. `last` belongs to it."""

    _fields_ = (("start", _u64), ("last", _u64))


class BindIommufd(ctypes.Structure):
    """struct vfio_device_bind_iommufd."""

    _fields_ = (("argsz", _u32), ("flags", _u32), ("iommufd", _i32), ("out_devid", _u32))


class AttachPageTable(ctypes.Structure):
    """struct vfio_device_attach_iommufd_pt."""

    _fields_ = (("argsz", _u32), ("flags", _u32), ("pt_id", _u32))


class IoasAlloc(ctypes.Structure):
    """struct iommu_ioas_alloc."""

    _fields_ = (("size", _u32), ("flags", _u32), ("out_ioas_id", _u32))


class IoasIovaRanges(ctypes.Structure):
    """struct iommu_ioas_iova_ranges."""

    _fields_ = (
        ("size", _u32),
        ("ioas_id", _u32),
        ("num_iovas", _u32),
        ("reserved", _u32),
        ("allowed_iovas", _u64),
        ("out_iova_alignment", _u64),
    )


class IoasMap(ctypes.Structure):
    """struct iommu_ioas_map."""

    _fields_ = (
        ("size", _u32),
        ("flags", _u32),
        ("ioas_id", _u32),
        ("reserved", _u32),
        ("user_va", _u64),
        ("length", _u64),
        ("iova", _u64),
    )


class IoasUnmap(ctypes.Structure):
    """struct iommu_ioas_unmap."""

    _fields_ = (("size", _u32), ("ioas_id", _u32), ("iova", _u64), ("length", _u64))


SIZES = {
    GroupStatus: 8,
    DeviceInfo: 16,
    RegionInfo: 32,
    Type1Info: 24,
    CapHeader: 8,
    DmaMap: 32,
    DmaUnmap: 24,
    IovaRange: 16,
    BindIommufd: 16,
    AttachPageTable: 12,
    IoasAlloc: 12,
    IoasIovaRanges: 32,
    IoasMap: 40,
    IoasUnmap: 24,
}
"""What the kernel's compiler says of each."""
for _structure, _size in SIZES.items():
    assert ctypes.sizeof(_structure) == _size, _structure.__name__


def call(fd: int, number: int, structure: ctypes.Structure) -> None:
    """The ioctl with a structure that says its own size in its first field. OSError."""
    setattr(structure, structure._fields_[0][0], ctypes.sizeof(structure))
    fcntl.ioctl(fd, number, structure)


def call_value(fd: int, number: int, value: int = 0) -> int:
    """The ioctl with a plain number. Its answer. OSError."""
    return fcntl.ioctl(fd, number, value)


def call_pointer(fd: int, number: int, argument: Any) -> int:
    """The ioctl with any ctypes object behind a pointer, where the answer is a number. OSError."""
    return int(fcntl.ioctl(fd, number, argument))
