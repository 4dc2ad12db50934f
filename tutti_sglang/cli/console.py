"""What all verbs share: one shape of JSON, one set of exit codes, errors that name the next command, progress bars."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tutti_sglang.errors import TuttiError
from tutti_sglang.units import format_size

SCHEMA = 1
"""Of the JSON that `--json` prints; raised when a field changes its meaning or goes."""

GOOD, FOUND, FAILED, REFUSED = 0, 1, 2, 3
"""Exit codes: nothing is wrong; something was found that needs a look; the command could not do its work; it was not
allowed to (`--yes` is missing)."""


WIDE = 160
"""Columns of a table that goes into a file or a pipe."""


class Answer(NamedTuple):
    """What a verb found: the data that `--json` prints, and its exit code."""

    data: Any
    code: int = GOOD


class RefusedError(TuttiError):
    """Something that cannot be undone was asked for without `--yes`."""


def answer(command: str, as_json: bool, act: Callable[[Console], Answer]) -> None:
    """Run a verb. `act` prints for people to the console it gets, which is silent under `--json`; then the one JSON
    object goes to standard output. Ends the process with the verb's exit code unless it is GOOD."""
    console = Console(quiet=as_json, width=None if sys.stdout.isatty() else WIDE, highlight=False)
    try:
        found = act(console)
    except TuttiError as error:
        code = REFUSED if isinstance(error, RefusedError) else FAILED
        message = str(error).removesuffix(error.hint).rstrip(" .") if error.hint else str(error)
        if as_json:
            _print(command, code, {"error": {"message": message, "hint": error.hint}})
        else:
            stderr().print(f"[bold red]tutti {command}:[/] {escape(message)}")
            if error.hint:
                stderr().print(escape(error.hint))
        raise typer.Exit(code) from error
    if as_json:
        _print(command, found.code, {"data": found.data})
    if found.code != GOOD:
        raise typer.Exit(found.code)


def stderr() -> Console:
    """For what is not the answer."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def need_yes(yes: bool, what: str) -> None:
    """RefusedError unless the user said so: nothing is asked on a terminal that may be a script's."""
    if not yes:
        raise RefusedError(f"{what} cannot be undone", "Say --yes to do it")


@contextlib.contextmanager
def progress(what: str, console: Console, *, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yields `advance(done, total)`. The bar, with rate and time left, goes to standard error."""

    def rate() -> TextColumn:
        return TextColumn("{task.fields[rate]}")

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), rate(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), disable=console.quiet, transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")

        def advance(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            text = "" if not speed else f"{format_size(speed)}/s" if in_bytes else f"{speed:,.0f}/s"
            bar.update(task, completed=done, total=total, rate=text)

        yield advance


def _print(command: str, code: int, fields: dict[str, Any]) -> None:
    whole = {"schema": SCHEMA, "command": command, "exit_code": code, **fields}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(whole, enc_hook=str)).decode() + "\n")
