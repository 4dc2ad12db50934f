"""From the rounds of benchmarks.storage to its tables and plots."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.plot import Point, line_plot
from benchmarks.report import Figures, Quartiles, Row, quartiles, ratios
from tutti_sglang.units import format_size

SPEED = {
    "GB/s": ("rate", "{:.2f}"),
    "accepted GB/s": ("accepted", "{:.2f}"),
    "of fio": ("of_fio", "{:.2f}"),
    "tutti over it": ("tutti_over_it", "{:.2f}"),
}
COST = {
    "beside a busy thread: own rate": ("busy_share", "{:.0%}"),
    "that thread's speed": ("busy_thread", "{:.0%}"),
    "CPU s/GB": ("cpu", "{:.2f}"),
    "GIL held ms/GB": ("gil", "{:.2f}"),
}


def summarise(rows: list[Row]) -> list[Row]:
    """One line for each size, operation and contender; ratios are medians of per-round ratios, with quartiles."""
    cases = dict.fromkeys((row["size"], row["operation"]) for row in rows)
    return [
        _line([row for row in rows if (row["size"], row["operation"]) == case], contender)
        for case in cases
        for contender in dict.fromkeys(row["contender"] for row in rows)
        if any(row["contender"] == contender and (row["size"], row["operation"]) == case for row in rows)
    ]


def tables(summary: list[Row]) -> Iterator[Figures]:
    """Speed and cost of each case: medians, quartiles in brackets. A column without figures is left out."""
    for size, operation in dict.fromkeys((line["size"], line["operation"]) for line in summary):
        lines = [line for line in summary if (line["size"], line["operation"]) == (size, operation)]
        for what, columns in (("speed", SPEED), ("cost", COST)):
            shown = {title: pick for title, pick in columns.items() if any(line[pick[0]] for line in lines)}
            title = f"{operation}, pages of {format_size(size)}: {what}"
            yield Figures(title, ["", *shown], [[line["contender"], *_cells(line, shown)] for line in lines])


def sweep(summary: list[Row]) -> Figures:
    """One table for many cases: GB/s of each operation and, in brackets, the share of fio's in the same rounds."""
    operations = list(dict.fromkeys(line["operation"] for line in summary))
    cases = dict.fromkeys((line["size"], line["contender"]) for line in summary)
    lines = []
    for size, contender in cases:
        own = {line["operation"]: line for line in summary if (line["size"], line["contender"]) == (size, contender)}
        lines.append([format_size(size), contender, *(_speed(own.get(each)) for each in operations)])
    return Figures("GB/s, median (of fio's)", ["pages of", "", *operations], lines)


def _speed(line: Row | None) -> str:
    if not line or not line["rate"]:
        return "-"
    share = f" ({line['of_fio'][1]:.2f})" if line["of_fio"] and line["contender"] != "fio" else ""
    return f"{line['rate'][1]:.2f}{share}"


def shown(settings: dict[str, Any], rows: list[Row]) -> list[Figures]:
    """The tables of a run."""
    summary = summarise(rows)
    return [sweep(summary)] if settings.get("sweep") else list(tables(summary))


def plot(summary: list[Row], folder: Path) -> None:
    """`storage-<operation>.svg`: GB/s over page size."""
    for operation in dict.fromkeys(line["operation"] for line in summary):
        lines = [line for line in summary if line["operation"] == operation and line["rate"]]
        ticks = {line["size"]: format_size(line["size"]) for line in lines}
        series: dict[str, list[Point]] = {}
        for line in lines:
            low, median, high = line["rate"]
            series.setdefault(line["contender"], []).append(Point(line["size"], median, low, high))
        titles = (f"{operation}: median and quartiles", "bytes of a page", "GB/s")
        line_plot(folder / f"storage-{operation}.svg", titles, series, ticks)


def _line(rows: list[Row], contender: str) -> Row:
    own = [row for row in rows if row["contender"] == contender]
    idle = [row for row in own if row["beside"] == "idle"]
    line: Row = {"size": own[0]["size"], "operation": own[0]["operation"], "contender": contender}
    line["rate"] = quartiles(_rate(row) for row in idle)
    line["accepted"] = quartiles(
        row["bytes"] / row["seconds_accepted"] / 1e9 for row in idle if "seconds_accepted" in row
    )
    line["of_fio"] = quartiles(ratios(rows, _pick(contender, "idle"), _pick("fio", "idle")))
    line["tutti_over_it"] = quartiles(ratios(rows, _pick("tutti", "idle"), _pick(contender, "idle")))
    line["busy_share"] = quartiles(ratios(rows, _pick(contender, "busy"), _pick(contender, "idle")))
    line["busy_thread"] = quartiles(row["turns_beside"] / row["turns_alone"] for row in own if row["beside"] == "busy")
    line["cpu"] = quartiles((row["cpu_user"] + row["cpu_system"]) / row["bytes"] * 1e9 for row in idle)
    line["gil"] = quartiles(row["gil_held"] / row["bytes"] * 1e12 for row in own if "gil_held" in row)
    line["cached_bytes"] = max((row.get("cached_bytes", 0) for row in own), default=0)
    return line


def _cells(line: Row, columns: dict[str, tuple[str, str]]) -> list[str]:
    values = [(line[name], pattern) for name, pattern in columns.values()]
    return [Quartiles(*value).show(pattern) if value else "-" for value, pattern in values]


def _rate(row: dict[str, Any]) -> float:
    """GB/s, with what was put on the drive."""
    return float(row["bytes"] / row["seconds"] / 1e9)


def _pick(contender: str, beside: str) -> Callable[[Row], float | None]:
    def pick(row: Row) -> float | None:
        return _rate(row) if row["contender"] == contender and row["beside"] == beside else None

    return pick
