"""`tutti top`: drives, hits and errors of a running server, live."""

import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tutti_sglang.cli.console import FOUND, GOOD, Answer, answer
from tutti_sglang.cli.options import Json
from tutti_sglang.cli.scrape import Change, look
from tutti_sglang.units import format_size


def top(
    url: Annotated[str, typer.Option("--url", "-u", help="The server.")] = "http://127.0.0.1:30000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval and end.")] = False,
    json: Json = False,
) -> None:
    """Watch a server: drives, bytes, hits by tier, misses, errors. Exit code 1 when a drive is out of service.

    Example: tutti top --url http://127.0.0.1:30000
    """

    def act(console: Console) -> Answer:
        change = _next(look(url), url, interval)
        if not (once or json):
            _watch(console, change, url, interval)
        else:
            console.print(picture(change))
        data = figures(change)
        return Answer(data, GOOD if all(drive["in_service"] for drive in data["drives"].values()) else FOUND)

    answer("top", json, act)


def _next(before: Any, url: str, interval: float) -> Change:
    time.sleep(interval)
    return Change(before, look(url))


def _watch(console: Console, change: Change, url: str, interval: float) -> None:
    try:
        with Live(picture(change), console=console, auto_refresh=False) as live:
            while True:
                change = _next(change.now, url, interval)
                live.update(picture(change), refresh=True)
    except KeyboardInterrupt:
        return


def figures(change: Change) -> dict[str, Any]:
    """What is shown, as numbers: bytes, objects per second, seconds."""
    now = change.now
    errors = change.now.by("tutti_io_errors", "drive")
    drives = {
        drive: {
            "in_service": value > 0,
            "segment_bytes": now.total("tutti_segment_bytes", drive=drive),
            "capacity_bytes": now.total("tutti_capacity_bytes", drive=drive),
            "errors": errors.get(drive, 0.0),
        }
        for drive, value in sorted(now.by("tutti_drive_in_service", "drive").items())
    }
    return {
        "drives": drives,
        "bytes_per_second": change.rates("tutti_bytes", "op"),
        "hits_per_second": change.rates("tutti_hit_objects", "tier"),
        "misses_per_second": change.rates("tutti_missed_objects", "reason"),
        "puts_per_second": change.rates("tutti_put_objects", "outcome"),
        "evicted_per_second": change.rate("tutti_evicted_objects"),
        "staging_bytes": now.by("tutti_staging_bytes", "kind"),
        "quarantined_bytes": now.total("tutti_quarantined_bytes"),
    }


def picture(change: Change) -> Group:
    """The same for people."""
    data = figures(change)
    drives = Table("drive", "state", "segments", "errors", title="Drives", title_justify="left")
    for drive, each in data["drives"].items():
        state = Text("in service", "green") if each["in_service"] else Text("out of service", "bold red")
        used = f"{format_size(each['segment_bytes'])} of {format_size(each['capacity_bytes'])}"
        drives.add_row(drive, state, used, f"{each['errors']:.0f}")
    rates = Table("", "per second", title="Objects", title_justify="left")
    for kind in ("hits", "misses", "puts"):
        for label, rate in sorted(data[f"{kind}_per_second"].items()):
            rates.add_row(f"{kind}: {label}", f"{rate:,.1f}")
    rates.add_row("evicted", f"{data['evicted_per_second']:,.1f}")
    moved = ", ".join(f"{op} {format_size(rate)}/s" for op, rate in sorted(data["bytes_per_second"].items()))
    staging = ", ".join(f"{kind} {format_size(size)}" for kind, size in sorted(data["staging_bytes"].items()))
    line = f"moved: {moved or 'nothing'}; staging: {staging or 'none'}"
    if data["quarantined_bytes"]:
        line += f"; {format_size(data['quarantined_bytes'])} still owed by a drive"
    return Group(Text(line), drives, rates)
