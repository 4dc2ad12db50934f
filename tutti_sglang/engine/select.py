"""Which engine moves the bytes on this machine, found by trying, and one honest line about the choice."""

import resource
from pathlib import Path

from tutti_sglang.config import Config
from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.gds import GdsEngine
from tutti_sglang.engine.gio import GioEngine
from tutti_sglang.engine.gio_backend import RawDrives
from tutti_sglang.engine.staging import Staging
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.engine.uring import UringEngine, uring_refused
from tutti_sglang.errors import EngineError
from tutti_sglang.gio.vfio.drive import VfioDrive
from tutti_sglang.kernels import native
from tutti_sglang.units import format_size

PYTHON_WORKERS = 16
"""Python threads per drive at most: each takes the GIL for every transfer, and more do not fill a drive better."""

_CAP_IPC_LOCK = 14


def create_engine(
    config: Config, segment_size: int, staging: Staging, volumes: dict[int, tuple[VfioDrive, int]] | None = None
) -> tuple[Engine, str]:
    """The engine that `config.engine` asks for, with `staging` registered where the limits allow it; and what was
    chosen, and why not something better. `volumes`: drives behind VFIO, as in RawDrives. Raises EngineError where
    `uring` or `gds` is demanded and this machine refuses it."""
    if config.engine == "threads":
        return _python_threads(config, segment_size), "Python threads, as configured"
    if config.engine == "gds":
        workers = min(config.queue_depth, PYTHON_WORKERS)
        device = GdsEngine(segment_size, workers, config.max_io)
        return device, "GPUDirect Storage where the device's memory is read into, Python threads elsewhere"
    if config.engine == "gio":
        raw = RawDrives(volumes or {}, [staging], relay=config.doorbell == "relay")
        twin = GioEngine(segment_size, config.queue_depth, config.max_io, raw=raw)
        return twin, f"gio on CPU threads, as configured: {_behind(config, len(raw.volumes))}"
    if native.library() is None:
        if config.engine == "uring":
            raise EngineError(f"engine = uring: {native.unavailable_reason()}", "Use engine = auto")
        return _python_threads(config, segment_size), f"Python threads: {native.unavailable_reason()}"
    if config.engine == "uring" and (refused := uring_refused()):
        raise EngineError(f"engine = uring: {refused}", "Use engine = auto, which takes native threads instead")
    engine = UringEngine(segment_size, queue_depth=config.queue_depth, max_io=config.max_io, staging=staging)
    return engine, f"native threads: {engine.refused}" if engine.refused else f"io_uring, {locked_memory(staging.size)}"


def _behind(config: Config, raw: int) -> str:
    """What is behind the queue pairs."""
    doorbells = "a relay rings their doorbells" if config.doorbell == "relay" else "the threads ring their doorbells"
    parts = [f"{raw} drives behind VFIO ({doorbells})"] if raw else []
    software = len(config.storage_dirs) - raw
    return " and ".join(parts + (["a software NVMe controller per drive"] if software else []))


def locked_memory(size: int) -> str:
    """Whether `size` bytes of staging can be registered with io_uring, and what to raise where they cannot."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (resource.RLIM_INFINITY, -1) or limit >= size or _may_lock_any():
        return "staging registered"
    return f"of {format_size(size)} staging {format_size(limit)} can be registered at most: raise `ulimit -l`"


def _may_lock_any() -> bool:
    """CAP_IPC_LOCK (capabilities(7)): RLIMIT_MEMLOCK does not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _python_threads(config: Config, segment_size: int) -> ThreadsEngine:
    return ThreadsEngine(segment_size, min(config.queue_depth, PYTHON_WORKERS), config.max_io)
