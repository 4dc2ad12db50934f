"""Writes the tables of the documents from the runs in docs/results/: none is typed by hand."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from benchmarks import (
    break_even,
    eviction,
    first_get,
    index,
    preload,
    preload_servers,
    serving,
    soak,
    steps,
    storage_summary,
    two_servers,
    windows,
)
from benchmarks.report import Figures, Report

DOCS = Path(__file__).parent.parent / "docs"
PAGES = tuple(DOCS / name for name in ("benchmarks.md", "direct-path.md", "fleet.md"))
RESULTS = DOCS / "results"
SERVED = ("chat", "long_context", "shared_prefix", "mixed", "compare")
TABLES: dict[str, Callable[[Report], Iterable[Figures]]] = {
    "storage": lambda run: storage_summary.shown(run.settings, run.rows),
    "index": lambda run: [index.figures(index.summarise(run.rows))],
    "soak": lambda run: [soak.figures(run.summary[0])],
    "eviction": lambda run: eviction.tables(run.rows),
    "windows": lambda run: [windows.figures(windows.summarise(run.rows))],
    "first_get": lambda run: [first_get.figures(first_get.summarise(run.rows))],
    "steps": lambda run: [steps.figures(steps.summarise(run.rows))],
    "break_even": lambda run: [break_even.figures(break_even.summarise(run.rows))],
    "preload": lambda run: [preload.figures(preload.summarise(run.rows))],
    "preload_servers": lambda run: [preload_servers.figures(run.rows)],
    "two_servers": lambda run: [two_servers.figures(run.rows)],
    **dict.fromkeys(SERVED, lambda run: [serving.figures(run.benchmark, serving.summarise(run.rows))]),
}
_BLOCK = re.compile(r"(<!-- results of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def published(page: str, results: Path) -> str:
    """The page with each block of results made anew; every figure is computed again from the rounds."""
    return _BLOCK.sub(lambda block: block[1] + _block(results / f"{block[2]}.json") + block[3], page)


def _block(path: Path) -> str:
    if not path.exists():
        return "Not recorded yet.\n"
    run = msgspec.json.decode(path.read_bytes(), type=Report)
    return "\n".join(["", run.markdown(), *(figures.markdown() for figures in TABLES[run.benchmark](run))])


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(published(each.read_text(), RESULTS))
