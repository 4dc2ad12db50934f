"""Writes the tables of docs/benchmarks.md from the runs in docs/results/: no figure on the page is typed by hand."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from benchmarks import eviction, index, serving, storage_summary
from benchmarks.report import Figures, Report

DOCS = Path(__file__).parent.parent / "docs"
PAGE, RESULTS = DOCS / "benchmarks.md", DOCS / "results"
TABLES: dict[str, Callable[[Report], Iterable[Figures]]] = {
    "storage": lambda run: storage_summary.tables(storage_summary.summarise(run.rows)),
    "chat": lambda run: [serving.figures("chat", serving.summarise(run.rows))],
    "long_context": lambda run: [serving.figures("long_context", serving.summarise(run.rows))],
    "index": lambda run: [index.figures(index.summarise(run.rows))],
    "eviction": lambda run: eviction.tables(run.rows),
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
    PAGE.write_text(published(PAGE.read_text(), RESULTS))
