"""Bars on a common axis of time as SVG: what happened beside what."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from benchmarks.plot import COLOURS

WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM = 900, 30, 170, 20, 44, 44


class Bar(NamedTuple):
    """From `begin` to `end` in seconds; `label` is shown where there is room; `colour`: of plot.COLOURS."""

    begin: float
    end: float
    label: str
    colour: int


def timeline(path: Path, title: str, rows: Mapping[str, Sequence[Bar]]) -> None:
    """Write one row of bars for each name."""
    end = max(bar.end for bars in rows.values() for bar in bars)
    scale = (WIDTH - LEFT - RIGHT) / end
    height = TOP + ROW * len(rows) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for step in range(11):
        across = LEFT + step / 10 * (WIDTH - LEFT - RIGHT)
        parts.append(f'<path d="M{across:.1f},{TOP}V{height - BOTTOM}" stroke="#ddd"/>')
        label = f"{end * step * 100:.0f}"
        parts.append(f'<text x="{across:.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{height - 8}" text-anchor="middle">ms since the requests arrived</text>')
    for number, (name, bars) in enumerate(rows.items()):
        top = TOP + ROW * number
        parts.append(f'<text x="{LEFT - 8}" y="{top + 19}" text-anchor="end">{escape(name)}</text>')
        for bar in bars:
            x, width = LEFT + bar.begin * scale, max(0.5, (bar.end - bar.begin) * scale - 0.5)
            fill = COLOURS[bar.colour]
            parts.append(f'<rect x="{x:.1f}" y="{top + 5}" width="{width:.1f}" height="{ROW - 10}" fill="{fill}"/>')
            if width > 14:
                middle = x + width / 2
                parts.append(
                    f'<text x="{middle:.1f}" y="{top + 19}" fill="white" text-anchor="middle">{bar.label}</text>'
                )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
