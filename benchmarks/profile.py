"""A profile of a running server with the tier, and its picture: how long prefills take, alone and beside busy drives.

Goal: what break-even and windows decide by on this machine. What measures is `tutti_sglang.schedule.profiling`.
"""

import argparse
from pathlib import Path

from benchmarks import report
from benchmarks.plot import Point, line_plot
from tutti_sglang.config import load_config
from tutti_sglang.schedule.profiling import NEW, PREFIX, ROUNDS, Profile, profile

WAYS = ("alone", "beside")


def main() -> None:
    """Measure, print, draw, and write the JSON."""
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", help="of the server")
    parser.add_argument("storage_dirs", nargs="+", help="those of the server")
    parser.add_argument("--index-dir", default="", help="that of the server")
    parser.add_argument("--new", default=",".join(map(str, NEW)), help="new tokens of a prefill")
    parser.add_argument("--prefix", default=",".join(map(str, PREFIX)), help="tokens before them")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it there")
    options = parser.parse_args()
    config = load_config({"storage_dirs": options.storage_dirs, "index_dir": options.index_dir}, {}).config
    settings = {name: getattr(options, name) for name in ("new", "prefix", "rounds")}
    run = report.Report("profile", report.machine(Path(options.storage_dirs[0])), settings)
    run.head()
    grid = {name: tuple(map(int, getattr(options, name).split(","))) for name in ("new", "prefix")}
    found = profile(options.url, config, _progress, rounds=options.rounds, **grid)
    run.contenders = found.table.identity
    run.rows = rows(found)
    drives = found.drives
    run.note(
        f"drives: {drives.read / 1e9:.2f} GB/s read, {drives.write / 1e9:.2f} GB/s written, "
        f"{drives.mixed / 1e9:.2f} GB/s both at once: {drives.mixing:.0%} lost"
    )
    figures(run.rows).show()
    run.write(options.json)
    if options.svg:
        plot(run.rows, options.svg)


def rows(found: Profile) -> list[report.Row]:
    """A row for each cell that was measured, times as quartiles in seconds."""
    cells = sorted(found.table.cells, key=lambda cell: (cell.prefix, cell.new))
    return [
        {
            "new": cell.new,
            "prefix": cell.prefix,
            "alone": report.quartiles(cell.seconds),
            "beside": report.quartiles(cell.beside),
        }
        for cell in cells
        if cell.seconds
    ]


def figures(measured: list[report.Row]) -> report.Figures:
    """The table."""
    lines = []
    for row in measured:
        spans = [report.Quartiles(*(1e3 * each for each in row[way])) if row[way] else None for way in WAYS]
        times = [span.show("{:.1f}") if span else "-" for span in spans]
        lines.append([f"{row['new']:.0f} on {row['prefix']:.0f}", *times])
    return report.Figures("prefills, ms: median and quartiles", ("new on earlier tokens", *WAYS), lines)


def plot(measured: list[report.Row], path: Path) -> None:
    """Milliseconds over new tokens, a line for each number of earlier tokens and way."""
    series: dict[str, list[Point]] = {}
    for row in measured:
        octave = round(row["prefix"], -2)
        for way in WAYS:
            if row[way]:
                low, median, high = (1e3 * each for each in row[way])
                name = f"on {octave:.0f}" + (", drives busy" if way == "beside" else "")
                series.setdefault(name, []).append(Point(row["new"], median, low, high))
    shown = {name: points for name, points in series.items() if len(points) > 1}
    ticks = {float(2**power): str(2**power) for power in range(5, 14)}
    line_plot(path, ("Prefills: median and quartiles", "new tokens", "ms"), shown, ticks)


def _progress(done: int, total: int, what: str) -> None:
    report.console.print(f"{done} of {total}: {what}", highlight=False)


if __name__ == "__main__":
    main()
