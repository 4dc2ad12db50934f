"""Hit rates of the store's eviction against LRU, FIFO and Belady's optimum, on traces with and without a one-shot scan.

Goal: what the policy itself is worth. `clock` runs the store's own policy code over slots in memory. Not a goal: speed,
or what watermarks cost: they keep further slots free. Capacity is a share of the distinct pages of the trace without
its scan.
"""

import argparse
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import policies, report, traces
from benchmarks.policies import Policy
from benchmarks.traces import Trace

POLICIES: dict[str, Callable[[int, Trace], Policy]] = {
    "clock": policies.Clock,
    "clock, second": functools.partial(policies.Clock, admission="second"),
    "lru": policies.Lru,
    "fifo": policies.Fifo,
    "optimum": policies.Belady,
}


def main() -> None:
    """Replay, print, and write the JSON."""
    options = _options()
    settings = {"capacities": options.capacities, "share": options.share, "group": 4, "sample": traces.MOONCAKE.name}
    run = report.Report("eviction", report.machine(Path(__file__).parent), settings)
    run.head()
    for name, trace in traces.all_traces(options.share):
        run.rows += measure(name, trace, options.capacities)
    run.summary = run.rows
    for figures in tables(run.rows):
        figures.show()
    run.write(options.json)


def measure(name: str, trace: Trace, capacities: Iterable[float]) -> list[report.Row]:
    """A row per capacity and policy. `hit_rate` of the counted pages; `written`: pages written per counted page."""
    distinct = len({page for pages, counted in trace if counted for page in pages})
    asked = sum(len(pages) for pages, counted in trace if counted)
    rows: list[report.Row] = []
    for capacity in capacities:
        for policy, make in POLICIES.items():
            cache = make(int(capacity * distinct), trace)
            row: dict[str, Any] = {"trace": name, "capacity": capacity, "policy": policy}
            rows.append(row | {"hit_rate": policies.hit_rate(cache, trace), "written": cache.written / asked})
    return rows


def tables(rows: Iterable[report.Row]) -> list[report.Figures]:
    """Hit rates, and pages written, of all policies side by side."""
    places: dict[tuple[str, float], dict[str, report.Row]] = {}
    for row in rows:
        places.setdefault((row["trace"], row["capacity"]), {})[row["policy"]] = row
    found = []
    for title, key in (("Hit rate in %", "hit_rate"), ("Pages written per 100 pages asked for", "written")):
        lines = [
            [f"{trace}, {capacity:.0%} of its pages", *(f"{100 * line[policy][key]:.1f}" for policy in POLICIES)]
            for (trace, capacity), line in places.items()
        ]
        found.append(report.Figures(title, ["trace", *POLICIES], lines))
    return found


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--capacities", type=_shares, default="0.1,0.2,0.4", help="shares of a trace's distinct pages")
    parser.add_argument("--share", type=float, default=1.0, help="how much of each trace to replay")
    return parser.parse_args()


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
