"""`tutti inspect`: what lies in a store, and which page of a prefix is missing."""

import datetime
import re
import time
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tutti_sglang.cli.console import FOUND, GOOD, Answer, answer
from tutti_sglang.cli.options import Directories, IndexDir, Json, Settings, config_of
from tutti_sglang.config import Config
from tutti_sglang.errors import ConfigError
from tutti_sglang.store.directory import INDEX
from tutti_sglang.store.survey import PrefixSurvey, Survey, prefix, survey
from tutti_sglang.units import format_size

_KEY = re.compile(r"[0-9a-f]{64}")


def inspect(
    directory: Directories = None,
    index_dir: IndexDir = "",
    config: Settings = "",
    keys: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="Page keys (hex) of one prefix, in order: which is missing?")
    ] = None,
    json: Json = False,
) -> None:
    """Show drives, namespaces, processes and wear of a store. Reads only; servers may run.

    Example: tutti inspect --dir /mnt/nvme0/tutti
    """

    def act(console: Console) -> Answer:
        settings = config_of(directory, index_dir, config)
        if keys:
            return _prefix(console, settings, keys)
        found = survey(settings)
        _show(console, found)
        return Answer(found, FOUND if any(each.problem for each in found.drives) else GOOD)

    answer("inspect", json, act)


def _show(console: Console, found: Survey) -> None:
    console.print(
        f"store {found.store}, format {found.format}, segments of {format_size(found.segment_size)}; "
        f"{found.objects:,} objects, {found.free_slots:,} free slots; index {found.index} "
        f"({format_size(found.index_bytes)})"
    )
    drives = Table("drive", "path", "segments", "of them", "free on it", "state", title="Drives", title_justify="left")
    for drive in found.drives:
        ordinal = "-" if drive.ordinal is None else str(drive.ordinal)
        sizes = (format_size(drive.segment_bytes), format_size(drive.free_bytes))
        drives.add_row(ordinal, drive.path, str(drive.segments), *sizes, drive.problem or "good")
    console.print(drives)
    spaces = Table("id", "what", "objects", "of slots", "payload", "hit lately", "made", title="Namespaces")
    spaces.title_justify = "left"
    for space in found.namespaces:
        made = time.strftime("%Y-%m-%d", time.localtime(space.created))
        payload, hits = format_size(space.objects * space.object_bytes), format_size(space.hit_bytes)
        spaces.add_row(str(space.id), space.label, f"{space.objects:,}", f"{space.slots:,}", payload, hits, made)
    console.print(spaces)
    alive = [owner.note for owner in found.owners if owner.alive]
    dead = len(found.owners) - len(alive)
    console.print(
        f"open in {len(alive)} process(es): {'; '.join(alive) or 'none'}" + (f"; {dead} died" if dead else "")
    )
    for day, written in sorted(found.written_bytes.items())[-7:]:
        console.print(f"written on {datetime.date.fromordinal(day)}: {format_size(written)}")


def _prefix(console: Console, config: Config, keys: list[str]) -> Answer:
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{key!r} is not a page key", "A key is 64 hex digits, as SGLang's debug log prints them")
    found = prefix(config.index_path / INDEX, [bytes.fromhex(key) for key in keys])
    for each in found:
        console.print(f"namespace {each.namespace}: {_verdict(each, len(keys))}")
    if not found:
        console.print(f"none of the {len(keys)} pages is in any namespace")
    return Answer([msgspec.structs.asdict(each) for each in found], GOOD if _whole(found, len(keys)) else FOUND)


def _whole(found: list[PrefixSurvey], pages: int) -> bool:
    return any(each.broken_at == pages for each in found)


def _verdict(found: PrefixSurvey, pages: int) -> str:
    if found.broken_at == pages:
        return f"all {pages} pages are there"
    later = found.present - found.broken_at
    return f"prefix broken at page {found.broken_at}; {later} later pages unreachable"
