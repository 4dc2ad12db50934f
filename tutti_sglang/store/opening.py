"""Opening a store: recognise the drives, open the index, see that both belong together, and put the parts together."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from tutti_sglang.config import Config
from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.rows import Rows
from tutti_sglang.engine.select import create_engine
from tutti_sglang.engine.staging import Staging
from tutti_sglang.engine.window import Window
from tutti_sglang.errors import ForeignStoreError, StoreError
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import directory, drives
from tutti_sglang.store.accepted import Accepted
from tutti_sglang.store.admission import Admission
from tutti_sglang.store.clock import Clock
from tutti_sglang.store.doubts import Doubts
from tutti_sglang.store.drives import Drive, Scan
from tutti_sglang.store.errands import Errands
from tutti_sglang.store.filesystem import look_at
from tutti_sglang.store.growth import Growth
from tutti_sglang.store.hits import Hits
from tutti_sglang.store.index import Index
from tutti_sglang.store.index_drive import IndexDrive
from tutti_sglang.store.locking import store_lock
from tutti_sglang.store.outcome import Ledger
from tutti_sglang.store.owners import Owners
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.raw import CHECK, RawDrive
from tutti_sglang.store.report import Reporter
from tutti_sglang.store.segments import Segments
from tutti_sglang.store.sums import SumFiles

LOCK_TIMEOUT = 10.0
OPEN_SECONDS = LOCK_TIMEOUT + 20.0
"""For the index directory to answer, locks that others hold included."""
_logger = logging.getLogger("tutti_sglang.store")


def open_parts(config: Config, metrics: Metrics, engine: Engine | None = None) -> Parts:
    """Everything of an open store, or nothing. `engine`: instead of the one that `config` asks for. StoreError,
    EngineError."""
    with contextlib.ExitStack() as undo:
        errands = Errands()
        undo.callback(errands.close, lambda: None)
        base = _answered(config, errands, partial(_open_base, config, metrics))
        undo.push(base.undo)
        with base.lock:
            index, held = base.index, base.held
            found, segment_size = _join_drives(config, index, held)
            for drive in found:
                undo.callback(drive.close)
            staging = Staging(config.staging_size, metrics)
            undo.callback(staging.close)
            note = "given by the caller"
            if engine is None:
                volumes = {each.ordinal: (each.device, CHECK) for each in found if isinstance(each, RawDrive)}
                engine, note = create_engine(config, segment_size, staging, volumes)
                undo.callback(engine.close, 0.0)
            ordinals = [drive.ordinal for drive in found]
            window = Window(Rows(index.meta("store") or ""), metrics, ordinals, enabled=config.windows == "on")
            undo.callback(window.close)
            if window.enabled and window.why_alone:
                _logger.warning("tutti: reads and writes of other processes are not seen (%s)", window.why_alone)
            segments = Segments(index, found, engine, segment_size)
            by_ordinal = {drive.ordinal: drive for drive in found}
            reporter = Reporter(_logger)
            parts = Parts(
                config=config,
                index_dir=base.index_dir,
                index=index,
                index_drive=IndexDrive(index, base.owners, errands, metrics, reporter),
                owners=base.owners,
                drives=by_ordinal,
                engine=engine,
                engine_note=note,
                staging=staging,
                segments=segments,
                sums=base.sums,
                metrics=metrics,
                reporter=reporter,
                ledger=Ledger(by_ordinal, metrics, reporter),
                accepted=Accepted(staging),
                doubts=Doubts(),
                hits=Hits(base.clock, segments),
                admission=Admission(config, index),
                window=window,
            )
            _take_stock(parts, held)
        undo.pop_all()
        return parts


def close_parts(parts: Parts, deadline: float) -> bool:
    """Give everything back. False when a drive still owes answers: then memory and files stay as they are, and so does
    the owner's lock, without which others would take the slots that the drive may still write to."""
    if not parts.engine.close(max(0.0, deadline - time.monotonic())):
        return False
    parts.segments.close()
    parts.staging.close()
    with contextlib.suppress(StoreError):
        parts.hits.flush()
        parts.admission.flush()
    parts.hits.clock.close()
    parts.window.close()
    parts.owners.close()
    parts.index.close()
    parts.sums.close()
    for drive in parts.drives.values():
        drive.close()
    os.close(parts.index_dir)
    return True


@dataclass
class _Base:
    """What lies in the index directory. `held`: whether the store's lock is, until the end of `lock`; `undo` closes
    all."""

    index_dir: int
    index: Index
    owners: Owners
    sums: SumFiles
    clock: Clock
    held: bool
    lock: contextlib.ExitStack
    undo: contextlib.ExitStack


def _answered(config: Config, errands: Errands, act: Callable[[], _Base]) -> _Base:
    """What it returns or raises. StoreError when the file system does not answer."""
    try:
        return errands.call(act, OPEN_SECONDS, _close_base)
    except TimeoutError as error:
        raise StoreError(
            f"The index directory {config.index_path} did not answer within {OPEN_SECONDS:.0f}s",
            f"{look_at(config.index_path)}; or set index_dir to another disk",
        ) from error


def _open_base(config: Config, metrics: Metrics) -> _Base:
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as lock:
        index_dir = _open_index_dir(config)
        undo.callback(os.close, index_dir)
        held = lock.enter_context(store_lock(index_dir, LOCK_TIMEOUT))
        index = Index(config.index_path / directory.INDEX, metrics)
        undo.callback(index.close)
        owners = Owners(config.index_path / directory.OWNERS)
        undo.callback(owners.close)
        sums = SumFiles(index_dir)
        undo.callback(sums.close)
        clock = Clock(index_dir, directory.CLOCK)
        undo.callback(clock.close)
        return _Base(index_dir, index, owners, sums, clock, held, lock.pop_all(), undo.pop_all())


def _close_base(base: _Base) -> None:
    with base.undo, base.lock:
        pass


def _open_index_dir(config: Config) -> int:
    path = str(config.index_path)
    try:
        fd = directory.open_directory(path)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"The index directory {path} cannot be used ({error.strerror})", "Set index_dir to another disk"
        ) from error
    try:
        directory.refuse_foreign(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _join_drives(config: Config, index: Index, held: bool) -> tuple[list[Drive], int]:
    """The drives in use, and the store's segment size. `held`: the store's lock, without which nothing new is made."""
    scan = drives.scan(config)
    try:
        store = index.meta("store")
        if not held and (store is None or any(each.fd >= 0 and each.block is None for each in scan.found)):
            raise StoreError(
                f"Another process has been holding the lock of the store at {config.index_path} for "
                f"{LOCK_TIMEOUT:.0f}s, and without it no drive can join",
                "Is one of its processes stopped? Look with: ps -eo pid,stat,cmd | grep ' T'",
            )
        if store is None:
            store = _adopt(scan, index, config)
        elif scan.store not in ("", store):
            raise ForeignStoreError(
                f"The drives belong to another store than the index in {config.index_path}",
                "Name the index_dir that goes with them, or empty them to let them join",
            )
        scan.segment_size = int(index.meta("segment_size") or scan.segment_size)
        known = msgspec.json.decode(index.meta("drives") or "{}", type=dict[int, str])
        joined = drives.join(scan, store, known, config)
        if known != (now := known | drives.registry(joined)):  # no write that a stopped writer could hold up
            index.set_meta("drives", msgspec.json.encode(now).decode())
        for each in scan.found:
            if each.problem:
                _logger.warning("tutti: %s is left out: %s; what lies on it is a miss", each.path, each.problem)
        return joined, scan.segment_size
    finally:
        scan.close()


def _adopt(scan: Scan, index: Index, config: Config) -> str:
    """A new index: of a new store, or of one whose index was lost."""
    if scan.store:
        _logger.warning("tutti: the index in %s is gone: the store starts empty", config.index_path)
    store = scan.store or drives.new_store_id()
    index.set_meta("segment_size", str(scan.segment_size))
    index.set_meta("store", store)
    return store


def _take_stock(parts: Parts, held: bool) -> None:
    """Reconcile files and index, and fix what each drive may hold. Without the lock (`held`), files stay as they are:
    who opens the store next looks after them. CapacityError, StoreError."""
    growth = Growth(parts)
    if held:
        lost = growth.reconcile()
        if lost:
            _logger.warning("tutti: %d objects are gone: files of their segments are missing or were cut off", lost)
    else:
        _logger.warning("tutti: another process holds the store's lock for long: is it stopped?")
        parts.segments.refresh()
    used = parts.segments.used()
    drives.set_limits(list(parts.drives.values()), used, parts.config, parts.segments.segment_size)
    if held:
        growth.shrink()
    for ordinal, drive in parts.drives.items():
        parts.metrics.set("tutti_capacity_bytes", drive.limit, drive=str(ordinal))
        parts.ledger.show(drive)
