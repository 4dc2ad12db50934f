"""`tutti doctor`: what this machine can do for the tier, what would be used, what is missing and how to get it."""

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tutti_sglang.cli import advice
from tutti_sglang.cli.advice import Finding, Level
from tutti_sglang.cli.console import FOUND, GOOD, Answer, answer
from tutti_sglang.cli.machine import Machine, look
from tutti_sglang.cli.options import Directories, IndexDir, Json, Settings, config_if_any

_COLOURS = {Level.GOOD: "green", Level.NOTE: "cyan", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(
    directory: Directories = None,
    index_dir: IndexDir = "",
    config: Settings = "",
    launch: Annotated[list[str] | None, typer.Argument(help="After --: the flags of a server, to look at too.")] = None,
    json: Json = False,
) -> None:
    """Look at this machine: software, engine, memory, drives, GPU paths. Exit code 1 when something does not work.

    Example: tutti doctor --dir /mnt/nvme0/tutti -- --page-size 1 --hicache-storage-backend tutti
    """

    def act(console: Console) -> Answer:
        settings = config_if_any(directory, index_dir, config)
        machine = look(settings)
        found = advice.findings(machine, settings, launch or ())
        show(console, machine, found)
        code = FOUND if any(each.level == Level.FAIL for each in found) else GOOD
        named = [msgspec.structs.asdict(each) | {"level": each.level.name.lower()} for each in found]
        return Answer({"engine": advice.chosen(machine), "findings": named, "machine": machine}, code)

    answer("doctor", json, act)


def show(console: Console, machine: Machine, found: list[Finding]) -> None:
    """A table for people; what to do stands below the finding it belongs to."""
    console.print(f"Linux {machine.kernel}, Python {machine.python}, SQLite {machine.sqlite}")
    table = Table("", "what", "found", show_edge=False, pad_edge=False)
    for each in found:
        colour = _COLOURS[each.level]
        hint = f"\n[dim]→ {escape(each.fix)}[/]" if each.fix else ""
        table.add_row(f"[{colour}]{each.level.name.lower()}[/]", escape(each.subject), f"{escape(each.found)}{hint}")
    console.print(table)
