"""Measure a running server and its drives, in minutes: what a profile is.

The server's own hooks time its prefills (`slack.Table`); here it is asked for prompts of every shape of a grid, first
alone and then while this process, a second user of the same store, keeps the drives busy. The server sees that in the
gate and keeps the two apart. What the drives give is measured here.
"""

import contextlib
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tutti_sglang.config import Config
from tutti_sglang.errors import StoreError
from tutti_sglang.schedule.slack import Saved
from tutti_sglang.store import Namespace, ObjectStore
from tutti_sglang.store.directory import PROFILES
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.scratch import Scratch

NEW = (64, 256, 1024, 4096)
PREFIX = (0, 1024, 4096, 16384)
ROUNDS = 3
LOADS = (1, 4, 16, 64)
"""MiB that are loaded at once."""

DRIVES = "drives.json"
_MIB = 1 << 20
_TENSORS = 8
_TIMEOUT = 600.0
_FIRST, _LAST = 32, 126  # token ids of any vocabulary

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what comes next."""


class Drives(msgspec.Struct):
    """What the store gives here: (bytes, seconds) of loads; bytes per second of reads and writes alone, and of both
    together where they meet, without windows. `sms`: (SMs, bytes per second) of gio's kernel, where it was measured."""

    loads: list[tuple[int, float]]
    read: float
    write: float
    mixed: float
    sms: list[tuple[int, float]] = []

    @property
    def mixing(self) -> float:
        """Share of the bandwidth that is lost where reads and writes meet."""
        return 1 - self.mixed / max(self.read, self.write, 1e-9)


class Profile(NamedTuple):
    """`path`: of the table, which the server has saved; `table`: what is in it."""

    path: Path
    table: Saved
    drives: Drives


def profile(
    url: str,
    config: Config,
    progress: Progress = lambda done, total, what: None,
    *,
    new: tuple[int, ...] = NEW,
    prefix: tuple[int, ...] = PREFIX,
    rounds: int = ROUNDS,
) -> Profile:
    """Of the server at `url`, whose tier has these settings; it should have nothing else to do, and its caches are
    flushed. StoreError where it does not answer or saves nothing."""
    shapes = [(each, before) for before in prefix for each in new]
    total, done = 2 * rounds * len(shapes) + 1, 1
    progress(0, total, "drives")
    drives = measure_drives(config)
    _save(config, drives)
    start = time.time()
    for beside in (False, True):
        with _busy(config) if beside else contextlib.nullcontext():
            for turn in range(rounds):
                for each, before in shapes:
                    progress(done, total, f"{each} tokens on {before}" + (", drives busy" if beside else ""))
                    _prefill(url, each, before, f"{start}/{beside}/{turn}/{each}/{before}")
                    done += 1
    progress(total, total, "saved")
    _ask(f"{url}/flush_cache?timeout=60", {})
    path, table = _saved(config, start)
    return Profile(path, table, drives)


def measure_drives(config: Config) -> Drives:
    """Through a store of its own on the same drives. StoreError, CapacityError."""
    with _Scratch(msgspec.structs.replace(config, windows="off")) as scratch:
        written = scratch.write()
        loads = [(mib * _MIB, min(scratch.load(mib) for _ in range(3))) for mib in LOADS if mib <= scratch.pages]
        size, seconds = loads[-1]
        mixed = scratch.both()
        return Drives(loads, size / seconds, written, mixed)


def saved_drives(folder: Path) -> Drives | None:
    """What was measured of the drives of a store whose profiles lie in `folder`."""
    try:
        return msgspec.json.decode((folder / DRIVES).read_bytes(), type=Drives)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


class _Scratch:
    """Objects of 1 MiB, removed at the end."""

    def __init__(self, config: Config) -> None:
        self.store = ObjectStore(config)
        tensors = (_MIB // _TENSORS,) * _TENSORS
        namespace = Namespace(model="tutti profile", weights="", dtype="", page_size=1, tensors=tensors, layers=(0, 4))
        # Little enough for staging, and for a store of any size.
        room = min(max(LOADS), self.store.stats().capacity // _MIB // 4, config.staging_size // _MIB // 4)
        self.pages = max(1, room)
        self._objects = Scratch(self.store, namespace, self.pages)
        self._next = 0

    def __enter__(self) -> "_Scratch":
        return self

    def __exit__(self, *_: object) -> None:
        self._objects.close()
        self.store.close()

    def write(self) -> float:
        """Bytes per second of new objects, on the drives."""
        start = time.monotonic()
        if not self._objects.put(_keys(self._next, self.pages)):
            raise StoreError("The store does not take what is written to it", "Run: tutti doctor")
        self._next += self.pages
        self.store.drain(60)
        return self.pages * _MIB / (time.monotonic() - start)

    def load(self, count: int) -> float:
        """Seconds for the first `count` objects."""
        start = time.monotonic()
        if not self._objects.get(_keys(0, count)):
            raise StoreError("What was just written to the drives could not be read", "Run: tutti verify")
        return time.monotonic() - start

    def both(self) -> float:
        """Bytes per second of reads and writes that meet."""
        moved = [0.0]
        writer = threading.Thread(target=lambda: moved.append(sum(self.write() > 0 for _ in range(2)) * self.pages))
        start = time.monotonic()
        writer.start()
        while writer.is_alive():
            self.load(self.pages)
            moved.append(self.pages)
        writer.join()
        return sum(moved) * _MIB / (time.monotonic() - start)


@contextlib.contextmanager
def _busy(config: Config) -> Iterator[None]:
    """The drives read all the time."""
    stop = threading.Event()
    with _Scratch(config) as scratch:
        scratch.write()

        def read() -> None:
            while not stop.is_set():
                scratch.load(scratch.pages)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _prefill(url: str, new: int, prefix: int, seed: str) -> None:
    """One prefill of this shape; what the model has no room for is left out."""
    tokens = random.Random(seed).choices(range(_FIRST, _LAST + 1), k=prefix + new)
    greedy = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    for length in filter(None, (prefix, prefix + new)):
        try:
            _ask(f"{url}/generate", {"input_ids": tokens[:length], "sampling_params": greedy})
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise StoreError(f"{url} answered {error.code}") from error
            return


def _ask(url: str, body: dict[str, Any]) -> None:
    data = msgspec.json.encode(body)
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            answer.read()
    except urllib.error.HTTPError:
        raise
    except OSError as error:
        raise StoreError(f"{url} does not answer: {error}", "Is it the address of the running server?") from error


def save_sms(folder: Path, sms: list[tuple[int, float]]) -> None:
    """Note what gio's kernel moves on how many SMs, beside what is known of the drives. OSError."""
    _write(folder, msgspec.structs.replace(saved_drives(folder) or Drives([], 0.0, 0.0, 0.0), sms=sms))


def _save(config: Config, drives: Drives) -> None:
    folder = config.index_path / PROFILES
    known = saved_drives(folder)
    _write(folder, msgspec.structs.replace(drives, sms=known.sms if known else []))


def _write(folder: Path, drives: Drives) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / DRIVES).write_bytes(msgspec.json.encode(drives))


def _saved(config: Config, start: float) -> tuple[Path, Saved]:
    """The table that the server wrote after `start`."""
    paths = [path for path in (config.index_path / PROFILES).glob("*.json") if path.name != DRIVES]
    latest = max(paths, key=lambda path: path.stat().st_mtime, default=None)
    if latest is None or latest.stat().st_mtime < start:
        raise StoreError(
            f"The server has saved no table in {config.index_path / PROFILES}",
            "Give the storage_dirs and index_dir of that server; it must run with the tier",
        )
    return latest, msgspec.json.decode(latest.read_bytes(), type=Saved)


def _keys(first: int, count: int) -> bytes:
    return b"".join(number.to_bytes(KEY_SIZE, "big") for number in range(first, first + count))
