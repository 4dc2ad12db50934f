"""`tutti profile`: measure a running server and its drives, for windows and break-even."""

import statistics
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti_sglang.cli.console import Answer, answer, progress
from tutti_sglang.cli.options import Directories, IndexDir, Json, Settings, as_visitor, config_of
from tutti_sglang.schedule import profiling
from tutti_sglang.schedule.profiling import Profile


def profile(
    url: Annotated[str, typer.Option("--url", "-u", help="The server; it should have nothing else to do.")] = (
        "http://127.0.0.1:30000"
    ),
    directory: Directories = None,
    index_dir: IndexDir = "",
    config: Settings = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often each shape of prompt is measured.")] = profiling.ROUNDS,
    json: Json = False,
) -> None:
    """Ask a running server for prompts of many shapes, alone and beside busy drives, and keep what they took.

    The server finds the result by itself, now and after a restart. Its caches are flushed.

    Example: tutti profile --url http://127.0.0.1:30000 --dir /mnt/nvme0/tutti
    """

    def act(console: Console) -> Answer:
        settings = as_visitor(config_of(directory, index_dir, config))
        with progress("profile", console) as advance:
            found = profiling.profile(
                url.rstrip("/"), settings, lambda done, total, _: advance(done, total), rounds=rounds
            )
        data = figures(found)
        _show(console, found, data)
        return Answer(data)

    answer("profile", json, act)


def figures(found: Profile) -> dict[str, Any]:
    """Seconds of a prefill by its shape, medians, and what the drives give."""
    cells = sorted(found.table.cells, key=lambda cell: (cell.prefix, cell.new))
    return {
        "path": str(found.path),
        "identity": found.table.identity,
        "prefills": [
            {
                "new": cell.new,
                "prefix": cell.prefix,
                "alone": statistics.median(cell.seconds),
                "beside": statistics.median(cell.beside) if cell.beside else None,
            }
            for cell in cells
            if cell.seconds
        ],
        "drives": found.drives,
        "mixing": found.drives.mixing,
    }


def _show(console: Console, found: Profile, data: dict[str, Any]) -> None:
    table = Table("new tokens", "on earlier", "alone", "beside busy drives", show_edge=False)
    for row in data["prefills"]:
        beside = "-" if row["beside"] is None else f"{1e3 * row['beside']:.1f} ms"
        table.add_row(f"{row['new']:.0f}", f"{row['prefix']:.0f}", f"{1e3 * row['alone']:.1f} ms", beside)
    console.print(table)
    drives = found.drives
    console.print(
        f"drives: {drives.read / 1e9:.2f} GB/s read, {drives.write / 1e9:.2f} GB/s written; reads and writes together "
        f"lose {drives.mixing:.0%}\nkept in {found.path}"
    )
