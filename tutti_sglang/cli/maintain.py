"""`tutti verify`, `tutti gc`, `tutti clear`: a store is looked after beside the servers that use it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tutti_sglang.cli.console import FOUND, GOOD, Answer, answer, need_yes, progress
from tutti_sglang.cli.options import Directories, IndexDir, Json, Settings, Yes, as_visitor, config_of
from tutti_sglang.config import Config
from tutti_sglang.errors import ConfigError, StoreError
from tutti_sglang.store import ObjectStore
from tutti_sglang.store.survey import NamespaceSurvey, survey
from tutti_sglang.units import format_size

STAGING = 64 << 20
"""Bytes through which a verification reads: what it needs does not grow with the store."""

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

NamespaceId = Annotated[
    int | None, typer.Option("--namespace", "-n", help="Only this one; `tutti inspect` lists them.")
]


@contextmanager
def _visit(config: Config) -> Iterator[ObjectStore]:
    """An existing store, open as one more of its processes. StoreError."""
    store = ObjectStore(msgspec.structs.replace(as_visitor(config), staging_size=STAGING))
    try:
        yield store
    finally:
        store.close()


def _look(config: Config, namespace: int | None) -> list[NamespaceSurvey]:
    """The namespaces that are meant: one, or all. StoreError where there is no store, or no such namespace."""
    namespaces = survey(config).namespaces
    known = [each.id for each in namespaces]
    if namespace is not None and namespace not in known:
        raise StoreError(f"The store has no namespace {namespace}", f"It has: {', '.join(map(str, known)) or 'none'}")
    return [each for each in namespaces if namespace in (None, each.id)]


def verify(
    directory: Directories = None,
    index_dir: IndexDir = "",
    config: Settings = "",
    namespace: NamespaceId = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove or make again what is wrong.")] = False,
    json: Json = False,
) -> None:
    """Read every object and compare its checksums; compare files and index. Servers may run.

    Example: tutti verify --dir /mnt/nvme0/tutti --repair
    """

    def act(console: Console) -> Answer:
        settings = config_of(directory, index_dir, config)
        total = sum(each.objects * each.object_bytes for each in _look(settings, namespace))
        done = 0
        with _visit(settings) as store, progress("verify", console, in_bytes=True) as advance:

            def count(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                advance(done, max(total, done))

            report = store.verify(repair, namespace, count)
        for problem in report.problems:
            console.print(f"  {problem}")
        state = "all is well" if report.good else f"{report.repaired} repaired" if repair else "run again with --repair"
        console.print(
            f"{report.objects:,} objects, {format_size(done)}: {report.damaged} damaged, {report.unreadable} "
            f"unreadable, {report.sums} rows of checksums, {report.lost + report.double} slots and {report.files} "
            f"files wrong: {state}"
        )
        return Answer(report, GOOD if report.good else FOUND)

    answer("verify", json, act)


def gc(
    directory: Directories = None,
    index_dir: IndexDir = "",
    config: Settings = "",
    namespace: NamespaceId = None,
    unused_for: Annotated[
        str, typer.Option("--unused-for", help="Also empty namespaces without a hit or a write for so long, as in 30d.")
    ] = "",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give back what crashed processes held, stray files, and segments that hold nothing. Servers may run.

    Example: tutti gc --dir /mnt/nvme0/tutti --unused-for 30d --yes
    """

    def act(console: Console) -> Answer:
        age = _age(unused_for) if unused_for else float("inf")
        if unused_for:
            need_yes(yes, f"Emptying namespaces that were not used for {unused_for}")
        settings = config_of(directory, index_dir, config)
        _look(settings, namespace)
        with _visit(settings) as store:
            gone = store.collect(age, namespace)
        console.print(
            f"{gone.segments} empty segments removed ({format_size(gone.segment_bytes)}); "
            f"{gone.namespaces} unused namespaces emptied ({gone.objects:,} objects)"
        )
        return Answer(gone._asdict())

    answer("gc", json, act)


def clear(
    directory: Directories = None,
    index_dir: IndexDir = "",
    config: Settings = "",
    namespace: NamespaceId = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove all objects, or those of one namespace, and give the disk back. Servers may run, and fill it again.

    Example: tutti clear --dir /mnt/nvme0/tutti --namespace 3 --yes
    """

    def act(console: Console) -> Answer:
        settings = config_of(directory, index_dir, config)
        objects = sum(each.objects for each in _look(settings, namespace))
        need_yes(yes, f"Removing {objects:,} objects from {settings.index_path}")
        with _visit(settings) as store:
            gone = store.collect(0.0, namespace)
        console.print(f"{gone.objects:,} objects removed, {format_size(gone.segment_bytes)} of disk given back")
        return Answer(gone._asdict())

    answer("clear", json, act)


def _age(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"{text!r} is not a span of time", "Write a number and s, m, h, d or w, as in 30d")
    return float(match[1]) * _SECONDS[match[2]]
