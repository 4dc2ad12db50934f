"""What a store holds, told by somebody who does not join it: nothing is created, locked or changed."""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tutti_sglang.config import Config
from tutti_sglang.errors import StoreError
from tutti_sglang.store import directory, schema, superblock
from tutti_sglang.store.audit import snapshot
from tutti_sglang.store.database import FAILURES
from tutti_sglang.store.index import Index
from tutti_sglang.store.owners import processes
from tutti_sglang.store.segments import file_name
from tutti_sglang.store.slots import NO_SLOT, SEGMENT_SHIFT

_SUFFIX = os.path.splitext(file_name(0))[1]


class DriveSurvey(msgspec.Struct, frozen=True):
    """One of `storage_dirs`: `ordinal` is None and `problem` says why where it is not a drive of the store. Bytes of
    its segments, of its file system, and free there."""

    path: str
    ordinal: int | None
    problem: str
    segments: int
    segment_bytes: int
    total_bytes: int
    free_bytes: int


class NamespaceSurvey(msgspec.Struct, frozen=True):
    """`identity`: what `namespace.readable` wrote; `objects` of `slots` are in use; bytes without padding; `created`:
    seconds since 1970; `hit_bytes`: recent ones, each counted half per half-life."""

    id: int
    identity: dict[str, Any]
    objects: int
    slots: int
    object_bytes: int
    created: int
    hit_bytes: int

    @property
    def label(self) -> str:
        """`kv of llama-8b, 64 tokens, bfloat16`, for one line of a table."""
        get = self.identity.get
        return f"{get('pool', '?')} of {get('model', '?')}, {get('page_size', '?')} tokens, {get('dtype', '?')}"


class OwnerSurvey(msgspec.Struct, frozen=True):
    """A process that has the store open, or died without leaving it."""

    alive: bool
    note: str


class Survey(msgspec.Struct, frozen=True):
    """All of a store. `written_bytes`: of each day (ordinal, as `datetime.date` counts), as far as
    they are kept."""

    store: str
    format: int
    index: str
    index_bytes: int
    segment_size: int
    objects: int
    free_slots: int
    drives: list[DriveSurvey]
    namespaces: list[NamespaceSurvey]
    owners: list[OwnerSurvey]
    written_bytes: dict[int, int]


class PrefixSurvey(msgspec.Struct, frozen=True):
    """Pages of one prefix in one namespace: how many are there, and the first that is not (their number, if none)."""

    namespace: int
    present: int
    broken_at: int


def survey(config: Config) -> Survey:
    """Look at the store that `config` names. StoreError where there is none."""
    index = config.index_path / directory.INDEX
    if not index.is_file():
        raise StoreError(
            f"There is no store at {config.index_path}",
            "Name the storage_dirs and index_dir that the server uses; its start-up line shows them",
        )
    try:
        with snapshot(index) as connection:
            meta = dict(connection.execute("select name, value from meta").fetchall())
            namespaces = [_namespace(*row) for row in connection.execute(_NAMESPACES, {"shift": SEGMENT_SHIFT})]
            (free,) = connection.execute("select coalesce(sum(count), 0) from free").fetchone()
            written = dict(connection.execute("select day, sum(bytes) from written group by day").fetchall())
    except FAILURES as error:
        raise StoreError(f"The index {index} cannot be read ({error})", "Run: tutti verify") from error
    return Survey(
        store=meta.get("store", ""),
        format=schema.FORMAT,
        index=str(index),
        index_bytes=sum(each.stat().st_size for each in index.parent.glob(f"{index.name}*")),
        segment_size=int(meta.get("segment_size", 0)),
        objects=sum(each.objects for each in namespaces),
        free_slots=free,
        drives=[_drive(path, meta.get("store", "")) for path in config.storage_dirs],
        namespaces=namespaces,
        owners=[OwnerSurvey(each.alive, each.note) for each in processes(config.index_path / directory.OWNERS)],
        written_bytes=written,
    )


def prefix(index: Path, keys: list[bytes]) -> list[PrefixSurvey]:
    """What namespaces have of the pages with these keys, in their order; only those that have any. StoreError."""
    if not index.is_file():
        raise StoreError(f"There is no index at {index}", "Name the storage_dirs and index_dir that the server uses")
    found = []
    try:
        opened = Index(index)
        try:
            for number in opened.namespaces():
                there = opened.lookup(number, b"".join(keys)).records["slot"] != NO_SLOT
                if there.any():
                    broken = len(keys) if there.all() else int(np.argmin(there))
                    found.append(PrefixSurvey(number, int(there.sum()), broken))
        finally:
            opened.close()
    except FAILURES as error:
        raise StoreError(f"The index {index} cannot be read ({error})", "Run: tutti verify") from error
    return found


# Objects are counted as slots in no other state: the table of objects itself may hold a hundred million rows.
_NAMESPACES = """
select id, readable, created, heat,
    (select coalesce(sum(slots), 0) from segments where namespace = n.id),
    (select coalesce(sum(count), 0) from free where namespace = n.id),
    (select count(*) from leased where slot >> :shift in (select id from segments where namespace = n.id)),
    (select count(*) from settling where slot >> :shift in (select id from segments where namespace = n.id))
from namespaces n order by id
"""


def _namespace(*row: Any) -> NamespaceSurvey:
    number, readable, created, heat, slots, free, leased, settling = row
    identity, size = _identity(readable)
    return NamespaceSurvey(number, identity, slots - free - leased - settling, slots, size, created, int(heat))


def _identity(readable: str) -> tuple[dict[str, Any], int]:
    """A namespace's fields and the payload bytes of an object; damage shows, and hides nothing else."""
    try:
        identity = msgspec.json.decode(readable, type=dict[str, Any])
        return identity, sum(msgspec.convert(identity.get("tensors", ()), tuple[int, ...]))
    except (msgspec.DecodeError, RecursionError) as error:
        return {"damaged": str(error)}, 0


def _drive(path: str, store: str) -> DriveSurvey:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return DriveSurvey(path, None, os.strerror(error.errno or 0), 0, 0, 0, 0)
    try:
        found = os.fstatvfs(fd)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        sizes = _segment_sizes(Path(path) / directory.SEGMENTS)
        block = superblock.read(fd, path)
        problem = "" if block and block.store == store else "not a drive of this store" if block else "no superblock"
        ordinal = block.drive if block and not problem else None
        return DriveSurvey(path, ordinal, problem, len(sizes), sum(sizes), total, free)
    except OSError as error:
        return DriveSurvey(path, None, str(error), 0, 0, 0, 0)
    finally:
        os.close(fd)


def _segment_sizes(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [each.stat(follow_symlinks=False).st_size for each in entries if each.name.endswith(_SUFFIX)]
