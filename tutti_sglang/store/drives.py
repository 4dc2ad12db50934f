"""The drives of a store: recognised by their superblock, whatever their order; who is missing; how much room each
has."""

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeVar

from tutti_sglang.config import Config, raw_name
from tutti_sglang.errors import CapacityError, ForeignStoreError, StoreError
from tutti_sglang.gio.vfio.drive import VfioDrive
from tutti_sglang.gio.vfio.iommu import AddressSpace
from tutti_sglang.store import directory, probe, superblock
from tutti_sglang.store.errands import ANSWER_SECONDS, Errands
from tutti_sglang.store.filesystem import look_at
from tutti_sglang.store.health import Health
from tutti_sglang.store.superblock import Superblock
from tutti_sglang.units import format_size

T = TypeVar("T")

OPEN_SECONDS = 10.0
"""For a drive to answer while the store is opened: one that sleeps spins up first."""

SILENT = "its file system does not answer"

DEFAULT_SHARE = 0.8
"""max_size = 0 takes this much of what is free or already ours when the store opens."""


@dataclass(slots=True)
class Found:
    """One of `storage_dirs` as it was at opening: its superblock if it has one, or why it cannot be used. `device`: of
    a raw drive, whose `fd` is that of its folder in the index directory."""

    path: str
    fd: int = -1
    block: Superblock | None = None
    problem: str = ""
    device: VfioDrive | None = None
    errands: Errands = field(default_factory=Errands)

    @property
    def on_root(self) -> bool:
        """Whether it lies on the root file system: then an empty one may be a mount point without its mount."""
        return self.fd >= 0 and os.fstat(self.fd).st_dev == os.stat("/").st_dev


@dataclass
class Drive:
    """A drive in use. `limit`: bytes that segments may take on it; `direct`: O_DIRECT works, else `why_buffered` says
    why not."""

    ordinal: int
    path: str
    segments: int
    direct: bool
    why_buffered: str
    min_free: int
    limit: int = 0
    reads: Health = field(default_factory=Health)
    writes: Health = field(default_factory=Health)
    errands: Errands = field(default_factory=Errands)
    _identity: tuple[int, int] | None = None

    share: ClassVar[float] = DEFAULT_SHARE

    def __post_init__(self) -> None:
        self._identity = directory.identity(self.path, superblock.NAME)

    def ask(self, act: Callable[[], T], seconds: float = ANSWER_SECONDS, undo: Callable[[T], None] | None = None) -> T:
        """A system call on this drive, by its own thread: one that takes longer than `seconds` puts it out of service,
        and the others wait no longer. OSError, TimeoutError among them; `undo` takes back what came too late."""
        try:
            return self.errands.call(act, seconds, undo)
        except TimeoutError:
            for health in (self.reads, self.writes):
                health.hang(SILENT)
            raise

    def free(self) -> int:
        """Bytes that the file system would still give to us. OSError."""
        status = self.ask(partial(os.fstatvfs, self.segments))
        return status.f_bavail * status.f_frsize

    def room(self, used: int) -> int:
        """Bytes of new segments that fit, where `used` bytes of segments are there already; negative when there are
        too many. OSError."""
        return min(self.limit - used, self.free() - self.min_free)

    @property
    def serves(self) -> bool:
        """Both reads and writes."""
        return self.reads.in_service and self.writes.in_service

    def present(self) -> bool:
        """False once its directory was deleted or another one stands in its place. OSError: it does not answer."""
        found = self.ask(partial(directory.identity, self.path, superblock.NAME))
        return self._identity is not None and found == self._identity

    def remove(self, name: str) -> None:
        """Unlink a file in `segments`, when the drive answers; no error is told."""
        unlink = partial(os.unlink, name, dir_fd=self.segments)
        try:
            self.ask(unlink)
        except TimeoutError:
            self.errands.later(unlink)
        except OSError:
            pass

    def close_file(self, fd: int) -> None:
        """Close a file of this drive: where it does not serve, closing may take as long as anything else."""
        if self.serves:
            os.close(fd)
        else:
            self.errands.later(partial(os.close, fd))

    def allocate(self, fd: int, size: int) -> bool:
        """Give an empty file its `size` bytes; False where the file system is to do it. OSError."""
        return False

    def sync(self, fd: int) -> None:
        """Bring what was written to a segment's file to the disk. OSError."""
        os.fdatasync(fd)

    def close(self) -> None:
        """Give the descriptor back."""
        self.errands.close(partial(os.close, self.segments))

    def describe(self, used: int) -> str:
        """`0 /mnt/nvme0: 3GiB of 200GiB, O_DIRECT`."""
        how = "O_DIRECT" if self.direct else f"page cache ({self.why_buffered})"
        return f"{self.ordinal} {self.path}: {format_size(used)} of {format_size(self.limit)}, {how}"


@dataclass
class Scan:
    """All of `storage_dirs` and what their superblocks agree on. `store` is empty where none has one yet."""

    found: list[Found]
    store: str = ""
    segment_size: int = 0

    def close(self) -> None:
        """Give the descriptors back."""
        for each in self.found:
            if each.fd >= 0:
                os.close(each.fd)
            if each.device:
                each.device.close()


def scan(config: Config) -> Scan:
    """Look at each of `storage_dirs`. ForeignStoreError, StoreError; a dead drive is only noted."""
    result = Scan([], segment_size=config.segment_size)
    try:
        for path in config.storage_dirs:
            spaces = (each.device.space for each in result.found if each.device)
            result.found.append(_look(path, config, next(spaces, None)))
        _agree(result)
    except BaseException:
        result.close()
        raise
    return result


def join(found: Scan, store: str, known: dict[int, str], config: Config) -> list[Drive]:
    """Bring the drives into use; the empty ones get a superblock and the next ordinals. The caller holds the store's
    lock.

    `known`: each ordinal the index has seen → its path, with a `/` at the end where it was a file system of its own.
    """
    blocks = [each.block for each in found.found if each.block]
    ordinal = max([-1, *known, *(block.drive for block in blocks)]) + 1
    drives = []
    for each in found.found:
        if each.fd >= 0 and each.block is None and each.on_root and each.path + "/" in known.values():
            each.problem = "it was a file system of its own and is now an empty directory: is it mounted?"
        if each.fd < 0 or each.problem:
            continue
        block = each.block or Superblock(
            format=superblock.FORMAT, store=store, drive=ordinal, segment_size=found.segment_size
        )
        drive = _guarded(each, partial(_opened, each, block, config))
        if drive:
            drives.append(drive)
            ordinal = max(ordinal, drive.ordinal + 1)
    if not drives:
        silent = [look_at(each.path) for each in found.found if each.problem == SILENT]
        raise StoreError(
            "None of storage_dirs can be used: " + "; ".join(f"{each.path}: {each.problem}" for each in found.found),
            silent[0] if silent else "Run: tutti doctor",
        )
    return drives


def set_limits(drives: list[Drive], used: dict[int, int], config: Config, needed: int) -> None:
    """Fix each drive's `limit`. CapacityError when none of them has segments or `needed` bytes of room for one."""
    for drive in drives:
        own = used.get(drive.ordinal, 0)
        drive.limit = config.max_size or int(drive.share * (own + drive.free()))
    if not any(used.values()) and all(drive.room(0) < needed for drive in drives):
        shown = ", ".join(f"{drive.path}: {format_size(drive.free())} free" for drive in drives)
        raise CapacityError(
            f"No room for even one segment of {format_size(needed)} beside min_free_space = "
            f"{format_size(config.min_free_space)} ({shown})",
            "Free some space, lower min_free_space or segment_size, or name a larger drive",
        )


def registry(drives: list[Drive]) -> dict[int, str]:
    """What `join` wants to know next time about each drive in use."""
    root = os.stat("/").st_dev
    return {each.ordinal: each.path + ("" if os.fstat(each.segments).st_dev == root else "/") for each in drives}


def new_store_id() -> str:
    """A random store id, 32 hex digits."""
    return uuid.uuid4().hex


def _look(path: str, config: Config, space: AddressSpace | None) -> Found:
    found = Found(path)

    def look() -> None:
        if raw_name(path):
            from tutti_sglang.store import raw  # builds on this module

            raw.look(found, config, space)
            return
        act = partial(_open_directory, path)
        found.fd, found.block = found.errands.call(act, OPEN_SECONDS, lambda late: os.close(late[0]))

    _guarded(found, look)
    return found


def _open_directory(path: str) -> tuple[int, Superblock | None]:
    fd = directory.open_directory(path)
    try:
        block = superblock.read(fd, path)
        if block is None:
            directory.refuse_foreign(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, block


def _guarded(found: Found, action: Callable[[], T]) -> T | None:
    """Do it; a dead drive is noted in `found.problem` and answered with None. StoreError."""
    try:
        return action()
    except StoreError:
        raise
    except OSError as error:
        if error.errno not in directory.GONE:
            raise StoreError(
                f"{found.path} cannot be used ({error.strerror})",
                f"Check that user {os.geteuid()} may write there: ls -ld {found.path}",
            ) from error
        found.problem = SILENT if isinstance(error, TimeoutError) else os.strerror(error.errno or 0)
        return None


def _agree(result: Scan) -> None:
    seen: dict[int, str] = {}
    for each in result.found:
        if each.block is None:
            continue
        result.store = result.store or each.block.store
        result.segment_size = each.block.segment_size
        if each.block.store != result.store:
            raise ForeignStoreError(
                f"{each.path} belongs to another store than {next(iter(seen.values()))}",
                "Use drives of one store together; to make it join this one, empty the directory",
            )
        if each.block.drive in seen:
            raise ForeignStoreError(
                f"{each.path} is a copy of {seen[each.block.drive]}: both are drive {each.block.drive} of one store",
                "Empty one of the two",
            )
        seen[each.block.drive] = each.path
    if len({each.block.segment_size for each in result.found if each.block}) > 1:
        raise ForeignStoreError("The superblocks of storage_dirs name different segment sizes", "Empty the newer ones")


def _opened(found: Found, block: Superblock, config: Config) -> Drive:
    if found.device:
        from tutti_sglang.store import raw

        return raw.open_drive(found, block)
    act = partial(_open, found, block, config)
    return found.errands.call(act, OPEN_SECONDS, lambda late: os.close(late.segments))


def _open(found: Found, block: Superblock, config: Config) -> Drive:
    if found.block is None:
        superblock.write(found.fd, block)
    segments = directory.open_subdirectory(found.fd, directory.SEGMENTS)
    try:
        probe.leave_check(segments)
        direct, why = probe.choose(segments, config.direct_io, found.path)
    except BaseException:
        os.close(segments)
        raise
    return Drive(block.drive, found.path, segments, direct, why, config.min_free_space, errands=found.errands)
