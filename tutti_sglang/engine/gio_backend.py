"""What is behind a drive's queue pairs in the gio engine: a software controller over segment files, or a real drive
behind VFIO, whose segments are ranges of its blocks."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import Batch
from tutti_sglang.errors import EngineError
from tutti_sglang.gio.controller import Service, SoftwareController
from tutti_sglang.gio.queues import Limits, Memory, QueuePairs, map_region
from tutti_sglang.gio.relay import Relay
from tutti_sglang.gio.twin import Endpoint, Pace
from tutti_sglang.gio.vfio import extent
from tutti_sglang.gio.vfio.controller import Mapped
from tutti_sglang.gio.vfio.drive import VfioDrive

_USER_SPACE = 1 << 47  # bytes: all addresses of a process
_BUS = 1 << 50  # where a software controller finds address 0: an address that was never translated is refused
_POLL_SECONDS = 50e-6  # a drive rings no bell; this is about what one read takes


class Options(NamedTuple):
    """What all drives of an engine have in common; see GioEngine."""

    segment_size: int
    depth: int
    max_io: int
    block: int
    plan: npt.NDArray[np.void] | None

    @property
    def limits(self) -> Limits:
        """What a software controller of the engine says of itself."""
        shift = self.block.bit_length() - 1
        return Limits(blocks=1 << (62 - shift), block_shift=shift, mdts=self.max_io)


class RawDrives(NamedTuple):
    """Drives behind VFIO. `volumes`: ordinal → the drive, and the byte from which on it is the store's; `memory`: what
    IOCTX may name; `relay`: doorbells go through a relay even where the mover could ring them; `reset_seconds`: a drive
    that owes an answer for so long is reset, as Linux does."""

    volumes: dict[int, tuple[VfioDrive, int]]
    memory: Sequence[Mapped]
    relay: bool = False
    reset_seconds: float = 30.0


class Backend(Protocol):
    """`regions`: (m,) REGION_DTYPE, what the controller can touch; `resets`: `stop` ends what hangs."""

    limits: Limits
    pairs: QueuePairs
    regions: Batch
    pace: Pace
    resets: bool
    segment_size: int

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """What the mover wakes."""

    def map(self, region: Mapped) -> int:
        """Let the controller read a region of the mover's memory; where it finds it. EngineError."""

    def start(self) -> None:
        """Once the mover is there."""

    def attach(self, segment: int, fd: int) -> None:
        """EngineError."""

    def forget(self, segment: int) -> None:
        """What starts on the segment from now on finds no file."""

    def detach(self, segment: int, busy: bool) -> bool:
        """False while the file is in use; `busy`: something of it is issued."""

    def translate(self, contexts: Batch) -> None:
        """Change offsets, which are those of attached segments, to the controller's."""

    def range_of(self, segment: int) -> int | None:
        """Where a segment begins, as the controller counts; None when it has no file."""

    def stop(self) -> None:
        """End everything that is under way; afterwards no memory is touched. EngineError when it is dead then."""

    def restart(self) -> None:
        """After `stop`; the queue pairs are as new. EngineError."""

    def close(self, timeout: float) -> bool:
        """False: a thread does not end."""


class SoftwareBackend:
    """Serves files that are attached; its threads cannot be made to end."""

    resets = False

    def __init__(self, native: ctypes.CDLL, memory: Memory, options: Options, number: int) -> None:
        self.limits, self.segment_size = options.limits, options.segment_size
        self.pace = Pace(options.depth)
        self.pairs = QueuePairs(memory, 1, options.depth.bit_length())
        self.regions = map_region(0, _USER_SPACE, _BUS)
        service = Service(workers=options.depth)
        self.controller = SoftwareController(native, self.limits, self.pairs, options.segment_size, service)
        self.controller.map(self.regions)
        if options.plan is not None:
            self.controller.set_bad_blocks(options.plan, number)

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """As Backend.endpoints."""
        return [self.controller]

    def map(self, region: Mapped) -> int:
        """As Backend.map; it sees all memory of the process."""
        return region.address + _BUS

    def start(self) -> None:
        """As Backend.start."""
        self.controller.start()

    def attach(self, segment: int, fd: int) -> None:
        """As Backend.attach."""
        self.controller.attach(segment, fd)

    def forget(self, segment: int) -> None:
        """As Backend.forget."""
        self.controller.detach(segment, 0)

    def detach(self, segment: int, busy: bool) -> bool:
        """As Backend.detach; the controller knows better what is in use."""
        return self.controller.detach(segment, 0)

    def translate(self, contexts: Batch) -> None:
        """As Backend.translate; it counts as the engine does."""

    def range_of(self, segment: int) -> int | None:
        """As Backend.range_of."""
        return segment * self.segment_size

    def stop(self) -> None:
        """As Backend.stop; it is never asked to."""

    def restart(self) -> None:
        """As Backend.restart; it is never asked to."""

    def close(self, timeout: float) -> bool:
        """As Backend.close."""
        return self.controller.close(timeout)


class RawBackend:
    """A drive behind VFIO, which stays the caller's."""

    resets = True

    def __init__(self, native: ctypes.CDLL, memory: Memory, options: Options, raw: RawDrives, number: int) -> None:
        """EngineError."""
        self._drive, self._start = raw.volumes[number]
        self._native, self.segment_size = native, options.segment_size
        self.limits = self._drive.limits(self._start, options.max_io)
        self.pace = Pace(options.depth, poll_seconds=_POLL_SECONDS)
        self.pairs = self._drive.create_pairs(memory, 1, options.depth.bit_length(), direct=not raw.relay)
        self.regions = np.concatenate([self._drive.map(region, memory) for region in raw.memory])
        self._relay = self._make_relay() if raw.relay else None

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """As Backend.endpoints."""
        return [self._relay] if self._relay else []

    def map(self, region: Mapped) -> int:
        """As Backend.map."""
        return self._drive.controller.map(region)

    def start(self) -> None:
        """As Backend.start."""

    def attach(self, segment: int, fd: int) -> None:
        """As Backend.attach; the file says which blocks it stands for."""
        if segment in self._drive.attached:
            raise EngineError(f"Segment {segment} has a file already", "Detach it first")
        self._drive.attached[segment] = extent.read(fd)

    def forget(self, segment: int) -> None:
        """As Backend.forget; the engine looks at its own list."""

    def detach(self, segment: int, busy: bool) -> bool:
        """As Backend.detach."""
        if not busy:
            self._drive.attached.pop(segment, None)
        return not busy

    def translate(self, contexts: Batch) -> None:
        """As Backend.translate."""
        segments, within = np.divmod(contexts["offset"], np.uint64(self.segment_size))
        numbers, inverse = np.unique(segments, return_inverse=True)
        starts = np.array([self._drive.attached[number] - self._start for number in numbers.tolist()], dtype=np.uint64)
        contexts["offset"] = starts[inverse] + within

    def range_of(self, segment: int) -> int | None:
        """As Backend.range_of."""
        found = self._drive.attached.get(segment)
        return None if found is None else found - self._start

    def stop(self) -> None:
        """As Backend.stop."""
        self._drive.stop()

    def restart(self) -> None:
        """As Backend.restart."""
        self.pairs.doorbells.view[:] = 0
        self._drive.restart()
        if self._relay:
            self._relay.close()
            self._relay = self._make_relay()

    def close(self, timeout: float) -> bool:
        """As Backend.close; no command is out."""
        if self._relay:
            self._relay.close()
        return True

    def _make_relay(self) -> Relay:
        return Relay(self._native, self.pairs, self._drive.doorbells())
