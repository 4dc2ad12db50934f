"""An NVMe controller driven from user space: reset, admin queue, Identify, I/O queues, shutdown (NVM Express base
specification 2.0, §3)."""

import time
from contextlib import suppress
from typing import Protocol

import numpy as np

from tutti_sglang.errors import EngineError
from tutti_sglang.gio import abi
from tutti_sglang.gio.vfio import identify
from tutti_sglang.gio.vfio.commands import ENTRIES, Answer, CommandQueue
from tutti_sglang.gio.vfio.device import Device
from tutti_sglang.gio.vfio.iommu import AddressSpace
from tutti_sglang.memory import Region

_CAP, _VS, _CC, _CSTS, _AQA, _ASQ, _ACQ, _DOORBELLS = 0x00, 0x08, 0x14, 0x1C, 0x24, 0x28, 0x30, 0x1000
_READY, _FATAL, _SHUTDOWN_DONE = 1, 2, 2 << 2
_ENABLE = 4 << 20 | 6 << 16 | 1  # CQEs of 2^4 and SQEs of 2^6 bytes, pages of 4 KiB, NVM command set, EN
_SHUTDOWN = 1 << 14
_CREATE_SQ, _CREATE_CQ, _IDENTIFY, _SET_FEATURES = 1, 5, 6, 9
_NUMBER_OF_QUEUES = 7
_CONTIGUOUS = 1
_ADMIN_SECONDS = 10.0
_STEP_SECONDS = 0.001
_UNPLUGGED = 0xFFFFFFFF


class Mapped(Protocol):
    """Memory with an address, as memory.Region or a device's BAR."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


class Controller:
    """`registers`: BAR 0; `stride`: bytes between doorbells; `deepest`: entries of the largest queue."""

    def __init__(self, space: AddressSpace, address: str) -> None:
        """Resets it: nothing that it did before goes on. EngineError."""
        self.address = address
        self.device = Device(space, address)
        self._mapped: list[Mapped] = []
        try:
            self.registers = self.device.bar(0)
        except BaseException:
            self.device.close()
            raise
        try:
            self._read_capabilities()
            self._admin = CommandQueue(self.registers, _DOORBELLS, self.stride)
            self._data = Region(identify.SIZE)
            self._admin_bus, self._data_bus = self.map(self._admin.memory), self.map(self._data)
            self.start()
            self.facts = identify.controller_facts(self.identify(1))
            if not self.facts.fits:
                raise EngineError(f"{address} has queue entries of another size than 64 and 16 bytes")
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> str:
        """`1.4`: of the specification it follows."""
        version = self.registers.read(_VS)
        return f"{version >> 16}.{version >> 8 & 0xFF}"

    def start(self) -> None:
        """Reset, give it its admin queue, and enable it; all other queues are gone. EngineError."""
        self.stop()
        self._admin.reset()
        self.registers.write(_AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1))
        self.registers.write_long(_ASQ, self._admin_bus)
        self.registers.write_long(_ACQ, self._admin_bus + abi.PAGE)
        self.registers.write(_CC, _ENABLE)
        if not self._wait(_READY | _FATAL, _READY):
            raise EngineError(
                f"{self.address} does not become ready (CSTS {self.registers.read(_CSTS):#x})", "Switch it off and on"
            )

    def stop(self) -> None:
        """Make sure that it touches memory no more: disable it; where it does not obey, reset the function; where that
        is not to be had, take the bus from it and raise EngineError."""
        if self.registers.read(_CSTS) != _UNPLUGGED:
            self.registers.write(_CC, 0)
            if self._wait(_READY, 0):
                return
            if self.device.reset() and self._wait(_READY, 0):
                return
        self.device.silence()
        raise EngineError(f"{self.address} does not stop: it was taken off the bus", "Switch it off and on")

    def admin(self, opcode: int, nsid: int = 0, data: int = 0, **words: int) -> Answer:
        """Carry out an admin command; words: cdw10 … cdw15. EngineError when it is not answered."""
        numbered = {int(name.removeprefix("cdw")): word for name, word in words.items()}
        answer = self._admin.carry_out(numbered, opcode, nsid, (data, 0), _ADMIN_SECONDS)
        if answer is None:
            raise EngineError(f"{self.address} does not answer admin command {opcode:#04x}", "Switch it off and on")
        return answer

    def identify(self, what: int, nsid: int = 0) -> bytes:
        """The data structure of Identify with CNS `what`. EngineError."""
        answer = self.admin(_IDENTIFY, nsid, self._data_bus, cdw10=what)
        if answer.status:
            raise EngineError(f"{self.address} refuses Identify {what} of namespace {nsid} ({answer.status:#05x})")
        return self._data.view.tobytes()

    def map(self, region: Mapped) -> int:
        """Let the device read and write memory until close(). Its bus address. EngineError."""
        bus = self.device.space.map(region.address, region.size)
        self._mapped.append(region)
        return bus

    def grant_queues(self, count: int) -> int:
        """Ask for `count` I/O queue pairs, once after each start. How many it gives. EngineError."""
        answer = self.admin(_SET_FEATURES, cdw10=_NUMBER_OF_QUEUES, cdw11=(count - 1) << 16 | (count - 1))
        if answer.status:
            raise EngineError(f"{self.address} gives no I/O queues ({answer.status:#05x})")
        return min(answer.result & 0xFFFF, answer.result >> 16) + 1

    def create_pair(self, number: int, entries: int, sq: int, cq: int) -> None:
        """I/O queue pair `number` (from 1) with rings at these bus addresses; it raises no interrupts. EngineError."""
        size = (entries - 1) << 16 | number
        for opcode, ring, word in ((_CREATE_CQ, cq, _CONTIGUOUS), (_CREATE_SQ, sq, number << 16 | _CONTIGUOUS)):
            answer = self.admin(opcode, data=ring, cdw10=size, cdw11=word)
            if answer.status:
                raise EngineError(f"{self.address} refuses I/O queue {number} ({answer.status:#05x})")

    def doorbell(self, number: int) -> int:
        """Offset in the registers of the SQ doorbell of a queue pair; the CQ's is `stride` bytes further."""
        return _DOORBELLS + 2 * number * self.stride

    def close(self) -> None:
        """Shut it down as before power is cut, so that its cache is on its flash, and let it go."""
        if self.registers.read(_CSTS) & (_READY | _FATAL) == _READY:
            self.registers.write(_CC, _ENABLE | _SHUTDOWN)
            self._wait(_SHUTDOWN_DONE, _SHUTDOWN_DONE)
        with suppress(EngineError):
            self.stop()
        for region in self._mapped:
            self.device.space.unmap(region.address, region.size)
        self.registers.close()
        self.device.close()

    def _read_capabilities(self) -> None:
        capabilities = self.registers.read_long(_CAP)
        self.deepest = (capabilities & 0xFFFF) + 1
        self.stride = 4 << (capabilities >> 32 & 15)
        self._timeout = max(1, capabilities >> 24 & 0xFF) * 0.5
        if capabilities >> 48 & 15 or not capabilities >> 37 & 1:
            raise EngineError(f"{self.address} knows no pages of 4 KiB, or no NVM command set")

    def _wait(self, bits: int, value: int) -> bool:
        """Whether these bits of CSTS become `value` within the time that the controller asks for."""
        until = time.monotonic() + self._timeout
        while self.registers.read(_CSTS) & bits != value:
            if time.monotonic() > until:
                return False
            time.sleep(_STEP_SECONDS)
        return True


def command_words(first_block: int, blocks: int) -> dict[int, int]:
    """CDW10 … 12 of a read or write."""
    lba = np.array([first_block], dtype="<u8").view("<u4")
    return {10: int(lba[0]), 11: int(lba[1]), 12: blocks - 1}
