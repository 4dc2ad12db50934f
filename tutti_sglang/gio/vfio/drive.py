"""A namespace of a drive behind VFIO, as a store uses it: a few blocks read and written here, queue pairs for a mover,
memory mapped for it, and a reset that ends what hangs."""

import errno
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_sglang.config import RawName
from tutti_sglang.errors import EngineError
from tutti_sglang.gio import abi
from tutti_sglang.gio.queues import Limits, Memory, QueuePairs, map_region, prp_table
from tutti_sglang.gio.vfio import identify
from tutti_sglang.gio.vfio.commands import ENTRIES, CommandQueue
from tutti_sglang.gio.vfio.controller import Controller, Mapped, command_words
from tutti_sglang.gio.vfio.iommu import AddressSpace
from tutti_sglang.memory import Region

SCHEME = "vfio:"
OWN_QUEUE = 1
"""The I/O queue pair that Python drives; a mover's come after it."""

_BUFFER = 64 << 10
_IO_SECONDS = 30.0
_MOST_QUEUES = 16
_READ, _WRITE, _FLUSH = 2, 1, 0


@dataclass(frozen=True)
class _Pair:
    """A mover's queue pair: what is needed to make it again after a reset."""

    number: int
    entries: int
    sq: int
    cq: int


class VfioDrive:
    """`attached`: segment → byte of the drive at which it begins, for those that a mover may be using.

    Its own few reads and writes are thread safe; everything else belongs to one thread at a time."""

    def __init__(self, space: AddressSpace, name: RawName, *, sgl: bool = True) -> None:
        """Resets the controller and asks what it is; nothing on the drive changes. `sgl = False`: use PRP lists, even
        with a drive that knows SGLs. EngineError."""
        self.space = space
        self.controller = Controller(space, name.address)
        try:
            self.nsid = name.nsid or self._only_namespace()
            self.facts = identify.namespace_facts(self.controller.identify(0, self.nsid))
            if problem := self.facts.problem():
                raise EngineError(f"Namespace {self.nsid} of {name.address} cannot be used: {problem}")
            self.sgl = sgl and self.controller.facts.sgl
            self._lock, self._closed = threading.Lock(), False
            registers, stride = self.controller.registers, self.controller.stride
            self._queue = CommandQueue(registers, self.controller.doorbell(OWN_QUEUE), stride)
            self._buffer = Region(_BUFFER)
            self._list = Region(abi.PAGE)  # of the pages of the buffer
            memories = (self._queue.memory, self._buffer, self._list)
            self._queue_bus, self._buffer_bus, list_bus = map(self.controller.map, memories)
            self._list.view.view("<u8")[:] = prp_table(self._buffer_bus, _BUFFER)[0]
            self._second_page = list_bus + 8
            self._piece = min(_BUFFER, self.controller.facts.mdts or _BUFFER)
            self._pairs: list[_Pair] = []
            self.attached: dict[int, int] = {}
            self._start_queues()
        except BaseException:
            self.controller.close()
            raise

    @property
    def block(self) -> int:
        """Bytes of a logical block."""
        return 1 << self.facts.block_shift

    def describe(self) -> str:
        """`Samsung SSD 990 (serial S1), namespace 1, 1.8TiB in blocks of 512, PRP, type1`."""
        facts = self.controller.facts
        pointers = "SGL" if self.sgl else "PRP"
        return (
            f"{facts.model} (serial {facts.serial}), namespace {self.nsid}, {self.facts.size} bytes in blocks of "
            f"{self.block}, {pointers}, {self.space.way.name}"
        )

    def limits(self, start: int, max_io: int) -> Limits:
        """For a mover that may reach what lies from byte `start` on, by commands of at most `max_io` bytes."""
        first = start >> self.facts.block_shift
        most = min(self.controller.facts.mdts or max_io, max_io)
        return Limits(self.facts.blocks - first, first, self.nsid, self.facts.block_shift, most, self.sgl)

    def create_pairs(self, memory: Memory, count: int, log_entries: int, *, direct: bool = True) -> QueuePairs:
        """`count` queue pairs in `memory`, which is mapped here. `direct`: the mover rings the drive's registers;
        otherwise words in memory, which a relay copies to `doorbells`. EngineError."""
        entries = 1 << log_entries
        if entries > self.controller.deepest or len(self._pairs) + count > self._granted - 1:
            raise EngineError(
                f"{self.controller.address} has room for {self._granted - 1 - len(self._pairs)} more queue pairs of at "
                f"most {self.controller.deepest} entries",
                "Lower queue_depth",
            )
        pairs = QueuePairs(memory, count, log_entries)
        sq, cq = self.controller.map(pairs.sq), self.controller.map(pairs.cq)
        for row in pairs.table:
            to_sq, to_cq = int(row["sq"]) - pairs.sq.address, int(row["cq"]) - pairs.cq.address
            pair = _Pair(OWN_QUEUE + 1 + len(self._pairs), entries, sq + to_sq, cq + to_cq)
            self.controller.create_pair(pair.number, pair.entries, pair.sq, pair.cq)
            self._pairs.append(pair)
            if direct:
                row["sq_doorbell"], row["cq_doorbell"] = self._doorbells(pair)
        return pairs

    def doorbells(self) -> list[tuple[int, int]]:
        """Addresses of the SQ and CQ registers of the mover's queue pairs, in the order they were made."""
        return [self._doorbells(pair) for pair in self._pairs]

    def map(self, region: Mapped, memory: Memory) -> npt.NDArray[np.void]:
        """(1,) REGION_DTYPE: let the drive read and write a region until close(); its PRP lists, if it needs any, lie
        in `memory`. EngineError."""
        bus = self.controller.map(region)
        if self.sgl:
            return map_region(region.address, region.size, bus)
        table = prp_table(bus, region.size)
        lists = memory.shared(table.nbytes)
        lists.view[: table.nbytes] = table.reshape(-1).view(np.uint8)
        return map_region(region.address, region.size, bus, self.controller.map(lists))

    def read(self, offset: int, size: int) -> bytes:
        """Whole blocks, by this process itself. OSError."""
        return b"".join(self._transfer(_READ, at, b"", length) for at, length in self._pieces(offset, size))

    def write(self, offset: int, data: bytes) -> None:
        """Whole blocks, by this process itself; in the drive's cache only until flush(). OSError."""
        for at, length in self._pieces(offset, len(data)):
            self._transfer(_WRITE, at, data[at - offset : at - offset + length], length)

    def flush(self) -> None:
        """Bring what was written before to the flash. OSError."""
        if self.controller.facts.volatile:
            self._command(_FLUSH, {})

    def stop(self) -> None:
        """End everything that is under way: afterwards the drive touches no memory. EngineError when even that took
        taking it off the bus; then restart() is in vain."""
        with self._lock:
            self.controller.stop()

    def restart(self) -> None:
        """Reset, and make all queue pairs again; their memory must be as new. EngineError."""
        with self._lock:
            self.controller.start()
            self._start_queues()

    def close(self) -> None:
        """Shut the controller down and let it go. Idempotent."""
        with self._lock:
            if not self._closed:
                self.controller.close()
            self._closed = True

    def _start_queues(self) -> None:
        """The number is asked for once after each reset."""
        self._queue.reset()
        self._granted = self.controller.grant_queues(_MOST_QUEUES)
        self.controller.create_pair(OWN_QUEUE, ENTRIES, self._queue_bus, self._queue_bus + abi.PAGE)
        for pair in self._pairs:
            self.controller.create_pair(pair.number, pair.entries, pair.sq, pair.cq)

    def _transfer(self, opcode: int, offset: int, data: bytes, length: int) -> bytes:
        assert offset % self.block == length % self.block == 0
        with self._lock:
            if data:
                self._buffer.view[:length] = np.frombuffer(data, dtype=np.uint8)
            second = self._buffer_bus + abi.PAGE if length <= 2 * abi.PAGE else self._second_page
            words = command_words(offset >> self.facts.block_shift, length >> self.facts.block_shift)
            self._carry_out(opcode, words, (self._buffer_bus, second if length > abi.PAGE else 0))
            return b"" if data else self._buffer.view[:length].tobytes()

    def _command(self, opcode: int, words: dict[int, int]) -> None:
        with self._lock:
            self._carry_out(opcode, words, (0, 0))

    def _carry_out(self, opcode: int, words: dict[int, int], data: tuple[int, int]) -> None:
        where = f"{SCHEME}{self.controller.address}"
        if self._closed:  # its registers are gone
            raise OSError(errno.ENODEV, f"{where} is closed")
        answer = self._queue.carry_out(words, opcode, self.nsid, data, _IO_SECONDS)
        if answer is None:
            raise OSError(errno.ETIMEDOUT, f"{where} does not answer")
        if answer.status:
            raise OSError(errno.EIO, f"{where} answers command {opcode} with status {answer.status:#05x}")

    def _doorbells(self, pair: _Pair) -> tuple[int, int]:
        address = self.controller.registers.address + self.controller.doorbell(pair.number)
        return address, address + self.controller.stride

    def _only_namespace(self) -> int:
        found = identify.active_namespaces(self.controller.identify(2))
        if len(found) != 1:
            shown = ", ".join(f"{SCHEME}{self.controller.address}/{number}" for number in found)
            raise EngineError(f"{self.controller.address} has {len(found)} namespaces", f"Name one: {shown}")
        return found[0]

    def _pieces(self, offset: int, size: int) -> list[tuple[int, int]]:
        return [(at, min(self._piece, offset + size - at)) for at in range(offset, offset + size, self._piece)]
