"""A PCI function in this process's hands: its configuration space, its registers mapped, its reset."""

import ctypes
import mmap
import os
import struct

import numpy as np

from tutti_sglang.errors import EngineError
from tutti_sglang.gio.vfio import ioctls
from tutti_sglang.gio.vfio.iommu import AddressSpace

_COMMAND = 4  # PCI configuration space: the command register, and its bits
_MEMORY_SPACE, _BUS_MASTER = 1 << 1, 1 << 2


class Mapping:
    """A BAR in our address space. `address` is valid until close()."""

    def __init__(self, fd: int, info: ioctls.RegionInfo) -> None:
        self.size = int(info.size)
        self._memory = mmap.mmap(fd, self.size, mmap.MAP_SHARED, offset=int(info.offset))
        self.address = int(np.frombuffer(self._memory, dtype=np.uint8).ctypes.data)

    def read(self, offset: int) -> int:
        """The 32-bit register at a byte offset."""
        return ctypes.c_uint32.from_address(self.address + offset).value

    def read_long(self, offset: int) -> int:
        """A 64-bit register, by its halves, as every controller allows it."""
        return self.read(offset) | self.read(offset + 4) << 32

    def write(self, offset: int, value: int) -> None:
        """A 32-bit register."""
        ctypes.c_uint32.from_address(self.address + offset).value = value

    def write_long(self, offset: int, value: int) -> None:
        """A 64-bit register, the lower half first."""
        self.write(offset, value & 0xFFFFFFFF)
        self.write(offset + 4, value >> 32)

    def close(self) -> None:
        """Nothing may touch it any more."""
        self._memory.close()


class Device:
    """Bus mastering is on from the start, and off again before the device is let go: then it can touch no memory."""

    def __init__(self, space: AddressSpace, address: str) -> None:
        """EngineError."""
        self.space, self.address = space, address
        self.fd = space.open(address)
        try:
            self._config = int(self._region(ioctls.VFIO_PCI_CONFIG_REGION_INDEX).offset)
            self._set_command(_MEMORY_SPACE | _BUS_MASTER, 0)
        except BaseException:
            space.release(self.fd)
            raise

    def bar(self, number: int) -> Mapping:
        """Base address register `number`, mapped. EngineError."""
        info = self._region(ioctls.VFIO_PCI_BAR0_REGION_INDEX + number)
        if not info.size or not info.flags & ioctls.VFIO_REGION_INFO_FLAG_MMAP:
            raise EngineError(f"The registers of {self.address} (BAR {number}) cannot be mapped")
        return Mapping(self.fd, info)

    def reset(self) -> bool:
        """Reset the function. False where it has no such reset."""
        info = ioctls.DeviceInfo()
        ioctls.call(self.fd, ioctls.VFIO_DEVICE_GET_INFO, info)
        if not info.flags & ioctls.VFIO_DEVICE_FLAGS_RESET:
            return False
        try:
            ioctls.call_value(self.fd, ioctls.VFIO_DEVICE_RESET)
        except OSError:
            return False
        self._set_command(_MEMORY_SPACE | _BUS_MASTER, 0)
        return True

    def silence(self) -> None:
        """Take the bus from it: from now on it reads and writes no memory, whatever state it is in."""
        self._set_command(0, _BUS_MASTER)

    def close(self) -> None:
        """Let it go; VFIO resets it. Its mappings must be closed."""
        self.silence()
        self.space.release(self.fd)

    def _region(self, index: int) -> ioctls.RegionInfo:
        info = ioctls.RegionInfo(index=index)
        ioctls.call(self.fd, ioctls.VFIO_DEVICE_GET_REGION_INFO, info)
        return info

    def _set_command(self, on: int, off: int) -> None:
        (command,) = struct.unpack("<H", os.pread(self.fd, 2, self._config + _COMMAND))
        os.pwrite(self.fd, struct.pack("<H", (command | on) & ~off), self._config + _COMMAND)
