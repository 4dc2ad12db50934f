"""Plots as SVG, small enough to read in a diff: a line and a band of quartiles per series, or bars; legend, axes."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 40, 48
DOTS = 40
"""Points of a series at most that are marked each."""
COLOURS = ("#1f5fbf", "#d9541e", "#2c8a3d", "#8a3db3", "#7a5c2e", "#c2306b", "#4a4a4a")


class Point(NamedTuple):
    """A median at `x`, with its quartiles."""

    x: float
    y: float
    low: float
    high: float


def line_plot(
    path: Path,
    titles: tuple[str, str, str],
    series: Mapping[str, Sequence[Point]],
    ticks: Mapping[float, str],
    *,
    linear: bool = False,
) -> None:
    """Write a plot, with logarithmic x unless `linear`. `titles`: of the plot, of x and of y; `ticks`: the labelled
    places on x."""
    scale: Callable[[float], float] = float if linear else math.log2
    xs = [scale(x) for x in ticks]
    top = _ceiling(max((point.high for points in series.values() for point in points), default=1.0))
    span = max(xs) - min(xs) or 1.0

    def place(x: float, y: float) -> str:
        across = LEFT + (scale(x) - min(xs)) / span * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = _frame(titles)
    for step in range(6):
        y = top * step / 5
        start = place(min(ticks), y)
        parts.append(f'<path d="M{start}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{start.split(",")[1]}" dy="4" text-anchor="end">{y:g}</text>')
    for x, label in ticks.items():
        across, _ = place(x, 0).split(",")
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(label)}</text>')
    for order, (name, points) in enumerate(series.items()):
        colour = COLOURS[order % len(COLOURS)]
        band = [place(p.x, p.high) for p in points] + [place(p.x, p.low) for p in reversed(points)]
        line = [place(p.x, p.y) for p in points]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.15"/>')
        parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= DOTS:
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (at.split(",") for at in line)]
        parts += _legend(order, name)
    _write(path, parts)


def bar_plot(path: Path, titles: tuple[str, str, str], series: Mapping[str, Mapping[str, float]]) -> None:
    """Write a plot with a group of bars for each name on x, and one bar in it for each series that has it."""
    groups = list(dict.fromkeys(name for values in series.values() for name in values))
    top = _ceiling(max((value for values in series.values() for value in values.values()), default=1.0))
    width = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    bar = 0.8 * width / max(1, len(series))
    parts = _frame(titles)
    for step in range(6):
        y = HEIGHT - BOTTOM - step / 5 * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y:.1f}" dy="4" text-anchor="end">{top * step / 5:g}</text>')
    for place, group in enumerate(groups):
        middle = LEFT + (place + 0.5) * width
        parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(group)}</text>')
    for order, (name, values) in enumerate(series.items()):
        colour = COLOURS[order % len(COLOURS)]
        for place, group in enumerate(groups):
            if group in values:
                high = values[group] / top * (HEIGHT - TOP - BOTTOM)
                x = LEFT + (place + 0.1) * width + order * bar
                size = f'width="{bar:.1f}" height="{high:.1f}"'
                parts.append(f'<rect x="{x:.1f}" y="{HEIGHT - BOTTOM - high:.1f}" {size} fill="{colour}"/>')
        parts += _legend(order, name)
    _write(path, parts)


def _legend(order: int, name: str) -> list[str]:
    row, colour = TOP + 20 * order, COLOURS[order % len(COLOURS)]
    return [
        f'<rect x="{WIDTH - RIGHT + 16}" y="{row}" width="14" height="4" fill="{colour}"/>',
        f'<text x="{WIDTH - RIGHT + 36}" y="{row + 6}">{escape(name)}</text>',
    ]


def _write(path: Path, parts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _frame(titles: tuple[str, str, str]) -> list[str]:
    title, across, up = map(escape, titles)
    middle = (HEIGHT + TOP - BOTTOM) / 2
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{title}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{across}</text>',
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{up}</text>',
    ]


def _ceiling(value: float) -> float:
    """The next of 1, 2, 2.5, 5 or 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in (1.0, 2.0, 2.5, 5.0, 10.0) if value <= step * power * (1 + 1e-9))
