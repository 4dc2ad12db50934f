"""Parsers that read whole files of a store's folders: each input is put where the file would be, and then used as the
tier uses it."""

import os
import sqlite3
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from prometheus_client import CollectorRegistry

from tutti_sglang.geometry import Stripe
from tutti_sglang.metrics import Metrics
from tutti_sglang.schedule.judge import Judge
from tutti_sglang.schedule.profiling import DRIVES, saved_drives
from tutti_sglang.schedule.slack import Table, digest
from tutti_sglang.store import directory, fingerprint
from tutti_sglang.store.index import RECORD_DTYPE, Index
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.owners import _NOTE_AT, _STATE, Owners, processes
from tutti_sglang.store.slots import slots_of
from tutti_sglang.store.sums import SumFiles

IDENTITY = {"model": "m", "device": "CPU"}
KEY = b"k" * KEY_SIZE
_INLINE = SimpleNamespace(map=map)
# In memory, where there is such a place: a disk would be written a million times.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_folder = tempfile.TemporaryDirectory(prefix="tutti-fuzz-", dir=_MEMORY)


@cache
def home() -> Path:
    """A folder of this process."""
    path = Path(_folder.name) / str(os.getpid())
    path.mkdir()
    return path


def weights(data: bytes) -> object:
    """A checkpoint's file. The pool of threads that reads blocks is left out: making it costs more than all else."""
    path = home() / "model.safetensors"
    path.write_bytes(data)
    return fingerprint._file_digest(path, _INLINE)  # type: ignore[arg-type]


def profile(data: bytes) -> object:
    """A table of prefill times, asked as a server asks it."""
    (home() / f"{digest(IDENTITY)}.json").write_bytes(data)
    table = Table.load(home(), IDENTITY)
    table.observe(100, 0, 0.01)
    table.observe(100, 64, 0.01, beside=True)
    asked = [(new, prefix) for new in (1, 64, 4096) for prefix in (0, 64, 1000)]
    return [(table.expected(*each), table.roughly(*each), table.slack(*each)) for each in asked], (
        table.recompute(5000, 100, 512),
        table.rows(),
    )


@cache
def _known() -> tuple[Table, Metrics]:
    table = Table(IDENTITY)
    for new in (64, 256, 1024, 4096):
        for _ in range(3):
            table.observe(new, 0, 1e-4 * new)
    return table, Metrics(CollectorRegistry())


def drives(data: bytes) -> object:
    """What a profile measured of the drives, taken in and decided by."""
    (home() / DRIVES).write_bytes(data)
    found = saved_drives(home())
    if found is None:
        return None
    judge = Judge(*_known())
    for nbytes, seconds in found.loads:
        judge.measured(nbytes, seconds)
    judge.announce("r", 64, 4096)
    return judge.pages("r", range(1, 65), 64, 1 << 20), judge.loads.expected(1e6), found.mixing


@cache
def _indexed() -> tuple[Index, int, sqlite3.Connection]:
    index = Index(home() / "index.db", Metrics(CollectorRegistry()))
    namespace = Namespace(model="m", weights="w", dtype="u1", page_size=1, tensors=(4096,), layers=(0, 1))
    space = index.namespace_id(namespace)
    index.add_segment(space, (0,), 4, 64, Stripe.TENSOR)
    slots = slots_of(index.lease("me", space, 1, 1 << 62))[:1]
    records = np.zeros(1, dtype=RECORD_DTYPE)
    records["slot"], records["generation"] = slots, 1
    assert index.publish("me", space, KEY, records).all()
    raw = sqlite3.connect(index.path, isolation_level=None)
    raw.execute("pragma synchronous = off")
    return index, space, raw


def record(data: bytes) -> object:
    """The columns of an object in the index: its record, and its id from the second half."""
    index, space, raw = _indexed()
    half = len(data) // 2
    raw.execute("update objects set record = ?, id = ?", (data[:half], data[half:]))
    found = index.lookup(space, KEY)
    there = index.occupants(0, 1 << 62)
    return found.records, found.damaged, there.keys, there.records


def record_seed() -> bytes:
    """What `record` reads when nothing is wrong."""
    _, _, raw = _indexed()
    return b"".join(raw.execute("select record, id from objects").fetchone())


@cache
def _owners() -> Owners:
    return Owners(home() / directory.OWNERS)


def owner(data: bytes) -> object:
    """The file of another owner, which is alive here: a descriptor holds its lock."""
    mine = _owners()
    path = home() / directory.OWNERS / ("0" * 32)
    path.write_bytes(data)
    return processes(path.parent), mine.dead(), mine.oldest_epoch(7, 60.0), mine._held(mine.uuid, 0.0, 60.0)


OWNER = _STATE.pack(5, 1.0, 2).ljust(_NOTE_AT, b"\0") + b"pid 1 on host, for people only\n"


@cache
def _sums() -> SumFiles:
    (home() / directory.SUMS).mkdir()
    return SumFiles(os.open(home(), os.O_RDONLY | os.O_DIRECTORY))


def sums(data: bytes) -> object:
    """A segment's file of checksums."""
    files = _sums()
    (home() / directory.SUMS / "000001.sum").write_bytes(data)
    rows = files.read(1, np.array([0, 3, 9]), 4)
    assert rows.shape == (3, 4)
    return rows
