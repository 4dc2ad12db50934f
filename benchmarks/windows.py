"""Reads of prefills against writes of decode steps on one drive, with windows and without, in interleaved rounds.

Goal: how long a read takes (p50, p99), what both move together, and what a step of a Python scheduler in the same
process takes beside it and alone. A request's life, over and over: its prefix is read (a prefill waits for it), then it
decodes for a while; pages to be written come at a steady rate all the time.
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks import report
from tutti_sglang.config import Config
from tutti_sglang.memory import Region
from tutti_sglang.metrics import Metrics
from tutti_sglang.schedule.rules import FOREVER, Mode
from tutti_sglang.store import Namespace, ObjectStore
from tutti_sglang.units import format_size, parse_size

PAGE = 1 << 20
PAGES = 256
BATCH = 8
CONTENDERS = ("windows on", "windows off", "no I/O")


class Load:
    """A store with PAGES pages to read, a thread that reads, one that puts, and the caller, who steps."""

    def __init__(self, folder: Path, windows: str, options: argparse.Namespace) -> None:
        self.options = options
        self.metrics = Metrics(CollectorRegistry())
        config = Config(storage_dirs=(str(folder),), max_size=2 << 30, min_free_space=0, windows=windows)
        self.store = ObjectStore(config, metrics=self.metrics)
        self.ns = self.store.attach(
            Namespace(model="m", weights="w", dtype="bfloat16", page_size=64, tensors=(PAGE // 8,) * 8, layers=(0, 4))
        )
        self._regions = [Region(options.read), Region(BATCH * PAGE)]
        self._put(0, PAGES)
        self.store.drain(120)

    def rows(self, region: int, pages: int) -> Any:
        """Addresses of `pages` pages of 8 tensors."""
        start = self._regions[region].address
        return (start + np.arange(pages)[:, None] * PAGE + np.arange(8) * (PAGE // 8)).astype(np.uint64)

    def run(self, seconds: float) -> dict[str, Any]:
        """One round: latencies of reads, bytes of both, times of steps."""
        until = time.monotonic() + seconds
        reads: list[float] = []
        before = [self.metrics.value("tutti_bytes", op=op) for op in ("read", "write")]
        overlap = self.metrics.value("tutti_overlap_seconds")
        threads = [
            threading.Thread(target=self._read, args=(until, reads)),
            threading.Thread(target=self._write, args=(until,)),
        ]
        for thread in threads:
            thread.start()
        steps = _steps(until)
        for thread in threads:
            thread.join()
        moved = [self.metrics.value("tutti_bytes", op=op) for op in ("read", "write")]
        return {
            "reads": reads,
            "steps": steps,
            "read_rate": (moved[0] - before[0]) / seconds,
            "write_rate": (moved[1] - before[1]) / seconds,
            "overlap": (self.metrics.value("tutti_overlap_seconds") - overlap) / seconds,
        }

    def close(self) -> None:
        """Write what is left and leave."""
        self.store.close()

    def _read(self, until: float, reads: list[float]) -> None:
        random = np.random.default_rng(self.options.seed)
        pages = self.options.read // PAGE
        while time.monotonic() < until:
            self.store.window.hear(Mode.PREFILL, 0)
            keys = b"".join(int(each).to_bytes(32, "big") for each in random.choice(PAGES, pages, replace=False))
            start = time.perf_counter()
            got = self.store.get(self.ns, keys, self.rows(0, pages), time.monotonic() + 8)
            reads.append(time.perf_counter() - start)
            assert got.all()
            for _ in range(self.options.decode_steps):
                self.store.window.hear(Mode.DECODE, FOREVER)
                time.sleep(0.01)

    def _write(self, until: float) -> None:
        number, gap = PAGES + time.time_ns() % (1 << 60), BATCH * PAGE / self.options.write_rate
        due = time.monotonic()
        while time.monotonic() < until:
            self._put(number, number + BATCH)
            number += BATCH
            due += gap
            time.sleep(max(0.0, due - time.monotonic()))

    def _put(self, first: int, last: int) -> None:
        for start in range(first, last, BATCH):
            keys = b"".join(number.to_bytes(32, "big") for number in range(start, start + BATCH))
            self.store.put(self.ns, keys, self.rows(1, BATCH), time.monotonic() + 30)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a round")
    parser.add_argument("--read", default="16MiB", help="of one request")
    parser.add_argument("--write-rate", default="150MiB", help="offered each second")
    parser.add_argument("--decode-steps", type=int, default=5, help="of 10 ms, between two requests")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the drive to be measured")
    options = parser.parse_args()
    options.read, options.write_rate = parse_size(options.read), parse_size(options.write_rate)
    base = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    settings = {name: getattr(options, name) for name in ("rounds", "seconds", "decode_steps", "seed")}
    settings |= {"read": format_size(options.read), "write_rate": format_size(options.write_rate)}
    run = report.Report("windows", report.machine(base), settings)
    run.head()
    loads = {name: Load(base / name[8:], name[8:], options) for name in CONTENDERS[:2]}
    try:
        run.contenders = {name: load.store.describe() for name, load in loads.items()}
        for turn in range(options.rounds):
            for name in report.rotated(CONTENDERS, turn):
                row = loads[name].run(options.seconds) if name in loads else _alone(options.seconds)
                run.rows.append({"round": turn, "contender": name} | row)
            report.console.print(f"round {turn + 1} of {options.rounds}", highlight=False)
    finally:
        for load in loads.values():
            load.close()
        shutil.rmtree(base, ignore_errors=True)
    run.summary = summarise(run.rows)
    figures(run.summary).show()
    run.write(options.json)


def summarise(rows: list[report.Row]) -> list[report.Row]:
    """A line per contender; times in seconds over all rounds, rates as quartiles of rounds."""
    lines = []
    for name in CONTENDERS:
        own = [row for row in rows if row["contender"] == name]
        reads = [value for row in own for value in row["reads"]]
        steps = [value for row in own for value in row["steps"]]
        line: report.Row = {"contender": name, "reads": len(reads)}
        line |= {"step_p50": _at(steps, 50), "step_p99": _at(steps, 99)}
        line |= {"read_p50": _at(reads, 50), "read_p99": _at(reads, 99)}
        line["rate"] = report.quartiles(row["read_rate"] + row["write_rate"] for row in own)
        line["written"] = report.quartiles(row["write_rate"] for row in own)
        line["overlap"] = statistics.mean(row["overlap"] for row in own)
        lines.append(line)
    return lines


def figures(summary: list[report.Row]) -> report.Figures:
    """The table of a run."""
    columns = (
        "",
        "reads",
        "read p50 ms",
        "p99",
        "read + written MB/s",
        "written MB/s",
        "overlap",
        "step p50 ms",
        "p99",
    )
    lines = []
    for line in summary:
        rates = [report.Quartiles(*(each / 1e6 for each in line[key])).show("{:.0f}") for key in ("rate", "written")]
        times = [f"{1e3 * line[key]:.2f}" for key in ("read_p50", "read_p99", "step_p50", "step_p99")]
        cells = [line["contender"], str(line["reads"]), *times[:2], *rates, _overlap(line), *times[2:]]
        lines.append(cells if line["reads"] else [cells[0], *["-"] * 6, *times[2:]])
    return report.Figures("reads of prefills beside writes of decode steps, one drive", columns, lines)


def _overlap(line: report.Row) -> str:
    """Who has windows off does not measure it."""
    return f"{line['overlap']:.1%}" if line["contender"] == CONTENDERS[0] else "-"


def _alone(seconds: float) -> dict[str, Any]:
    steps = _steps(time.monotonic() + seconds)
    return {"reads": [], "steps": steps, "read_rate": 0.0, "write_rate": 0.0, "overlap": 0.0}


def _steps(until: float) -> list[float]:
    """Times of a piece of Python like a scheduler's step, with a pause after each, in which a GPU would compute."""
    times = []
    while time.monotonic() < until:
        start = time.perf_counter()
        sum(divmod(number, 7)[1] for number in range(5000))
        times.append(time.perf_counter() - start)
        time.sleep(0.005)
    return times


def _at(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


if __name__ == "__main__":
    main()
