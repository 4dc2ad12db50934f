"""Hours of requests against one store, with restarts, kills and failing drives: nothing lost, nothing wrong, no growth.

Two processes use the store through SGLang's own cache controller. One lives all the time, and detaches and attaches the
tier now and then; the other is killed at any moment and started again. In every other life a drive has bad blocks (a
seeded plan below the engine: errors, short, torn, late and stalled transfers). Every byte that is read is compared
with what its name says. What is stored before a restart must be there after it.

Exit code 1 when something was lost or wrong, or memory grew.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.plot import Point, line_plot
from benchmarks.soak_worker import Worker
from benchmarks.soaker import Case
from tutti_sglang.units import format_size, parse_size

BURST = 1.5
"""Seconds of work between two looks of the parent."""
SAMPLE = 10.0
"""Seconds between two samples."""
WARM_UP = 10.0
"""Minutes at most before growth counts; less in a run that is shorter than an hour."""
LEAK = 1.0
"""MiB a minute of resident memory, from which on it grows."""
LEAST_SLOPE_MINUTES = 5.0
SUMS = ("requests", "asked", "came", "wrong", "written_bytes", "read_bytes", "evicted", "torn", "io_errors", "resumed")


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace, directory: Path, run: report.Report) -> None:
        self._options, self._run, self._random = options, run, random.Random(options.seed)
        self._case = Case(directory, options.capacity, options.segment, options.seed, options.rate / 2)
        self._sampled = -SAMPLE
        self._totals: Counter[str] = Counter()
        self._latest: dict[str, dict[str, float]] = {}
        self._lives: Counter[str] = Counter(side=1)
        self._main, self._side = Worker(self._case), self._new_side()
        self._open("main", self._main)
        self._open("side", self._side)
        self._began = time.monotonic()

    def go(self) -> None:
        """Until the time is over."""
        until = self._began + 60 * self._options.minutes
        restart = time.monotonic() + self._options.life
        kinds = 0
        while time.monotonic() < until:
            self._work()
            if time.monotonic() >= restart:
                (self._restart, self._kill)[kinds % 2]()
                kinds += 1
                restart = time.monotonic() + self._options.life
            if time.monotonic() - self._sampled >= SAMPLE:
                self._sample()

    def end(self) -> list[str]:
        """Close all, look at the whole store, and say what is not as it should be."""
        for worker in (self._main, self._side):
            worker.call("close")
        self._main.call("open", 0)
        verified = self._main.call("verify")
        self._note("main", self._main.call("state"))
        self._main.call("close")
        self._sample(last=True)
        for name in ("main", "side"):
            self._settle(name)
        self._run.summary = [self._summary(verified)]
        return complaints(self._run.summary[0])

    def kill(self) -> None:
        """Leave no process."""
        for worker in (self._main, self._side):
            worker.kill()

    def _new_side(self) -> Worker:
        return Worker(self._case._replace(seed=self._random.getrandbits(32)))

    def _open(self, name: str, worker: Worker) -> None:
        self._lives[name] += 1
        faulty = self._lives[name] % 2 == 0
        self._totals["lives_with_faults"] += faulty
        worker.call("open", self._random.getrandbits(32) if faulty else 0)

    def _work(self) -> None:
        for worker in (self._main, self._side):
            worker.ask("work", BURST)
        for name, worker in (("main", self._main), ("side", self._side)):
            self._note(name, worker.answer())

    def _restart(self) -> None:
        """Detach and attach, while the other process is idle: what was stored must still be there. The new life has no
        faults while that is looked at."""
        evicted = self._evicted()  # before it is asked what is held: the other process may still make room meanwhile
        held = self._main.call("held")
        self._main.call("close")
        self._main.call("open", 0)
        found = self._main.call("check", held)
        gone = found["held"] - found["came"]
        excused = found["torn"] + self._evicted() - evicted
        self._totals.update(restarts=1, held=found["held"], gone=gone, late=found["late"])
        self._totals.update(wrong_after_restart=found["wrong"])
        self._totals["evicted_meanwhile"] += int(excused - found["torn"])
        self._totals["lost"] += max(0, gone - excused)
        self._main.call("close")
        self._open("main", self._main)

    def _kill(self) -> None:
        """SIGKILL in the middle of its work, and another process in its place."""
        self._side.ask("work", BURST)
        time.sleep(self._random.random() * BURST)
        self._side.kill()
        self._settle("side")
        self._totals.update(kills=1)
        self._side = self._new_side()
        self._open("side", self._side)

    def _evicted(self) -> float:
        return sum(worker.call("state")["evicted"] for worker in (self._main, self._side))

    def _note(self, name: str, state: dict[str, float]) -> None:
        self._latest[name] = state

    def _settle(self, name: str) -> None:
        """Add up what a process did that is no more."""
        state = self._latest.pop(name, {})
        self._totals.update({key: state.get(key, 0) for key in (*SUMS, "call_errors")})

    def _sample(self, *, last: bool = False) -> None:
        self._sampled = time.monotonic()
        minutes = (self._sampled - self._began) / 60
        for name, worker in (("main", self._main), ("side", self._side)):
            row: report.Row = {"minutes": round(minutes, 3), "process": name, "last": last, **of_process(worker.pid)}
            self._run.rows.append(row | self._latest.get(name, {}))
        main = self._run.rows[-2]
        report.console.print(
            f"{minutes:.1f} min: {main['requests']:.0f} requests of the first process, {main['rss'] >> 20} MiB, "
            f"{main['descriptors']} descriptors, {main['threads']} threads, {self._totals['restarts']} restarts, "
            f"{self._totals['kills']} kills",
            highlight=False,
        )

    def _summary(self, verified: dict[str, int]) -> report.Row:
        totals = {key: self._totals[key] for key in (*SUMS, "call_errors", "restarts", "kills", "lives_with_faults")}
        totals |= {
            key: self._totals[key]
            for key in ("held", "late", "gone", "evicted_meanwhile", "lost", "wrong_after_restart")
        }
        minutes = (time.monotonic() - self._began) / 60
        warm = min(WARM_UP, 0.4 * minutes)
        slope = growth(self._run.rows, warm) if minutes - warm >= LEAST_SLOPE_MINUTES else None
        return {
            "minutes": minutes,
            "capacity": self._options.capacity,
            "written_over_capacity": self._totals["written_bytes"] / self._options.capacity,
            "faults_seen": sum(self._totals[key] for key in ("io_errors", "torn", "resumed")),
            "warm_up_minutes": warm,
            "slope": slope,
            "verified": verified,
            **totals,
        }


def of_process(pid: int) -> report.Row:
    """Bytes in memory, descriptors and threads."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    return {
        "rss": int(status["VmRSS"].split()[0]) << 10,
        "descriptors": len(os.listdir(folder / "fd")),
        "threads": int(status["Threads"]),
    }


def growth(rows: list[report.Row], warm_up: float) -> float:
    """MiB a minute of the process that lives all the time, after `warm_up` minutes, by least squares."""
    own = [row for row in rows if row["process"] == "main" and not row["last"] and row["minutes"] >= warm_up]
    return float(np.polyfit([row["minutes"] for row in own], [row["rss"] / (1 << 20) for row in own], 1)[0])


def complaints(summary: report.Row) -> list[str]:
    """What must not be."""
    found = [
        f"{summary[key]:.0f} {what}"
        for key, what in (
            ("wrong", "pages came with other bytes"),
            ("wrong_after_restart", "pages came with other bytes after a restart"),
            ("lost", "pages were lost by a restart"),
            ("call_errors", "exceptions were kept from SGLang"),
        )
        if summary[key]
    ]
    found += [
        f"{summary['verified'][kind]} {kind}"
        for kind in ("unreadable", "lost", "double", "stray", "files")
        if summary["verified"][kind]
    ]
    if summary["slope"] is not None and summary["slope"] >= LEAK:
        found.append(f"memory grows by {summary['slope']:.2f} MiB a minute")
    return found


def figures(summary: report.Row) -> report.Figures:
    """The table of a run."""
    slope = summary["slope"]
    lines = [
        ["minutes", f"{summary['minutes']:.1f}"],
        ["requests", f"{summary['requests']:,.0f}"],
        ["pages that came from the store, of those asked for", f"{summary['came']:,.0f} of {summary['asked']:,.0f}"],
        [
            "written",
            f"{summary['written_bytes'] / 1e9:.2f} GB, {summary['written_over_capacity']:.1f} times the capacity",
        ],
        ["evicted objects", f"{summary['evicted']:,.0f}"],
        ["restarts, and processes killed", f"{summary['restarts']} and {summary['kills']}"],
        [
            "faults: I/O errors, torn pages, short transfers",
            f"{summary['io_errors']:.0f}, {summary['torn']:.0f}, {summary['resumed']:.0f}",
        ],
        [
            "pages held before a restart; of them late, spoiled by a torn write or evicted, lost",
            f"{summary['held']}; {summary['late']}, {summary['gone'] - summary['lost']:.0f}, {summary['lost']:.0f}",
        ],
        ["pages with other bytes", f"{summary['wrong'] + summary['wrong_after_restart']}"],
        ["growth of resident memory, MiB a minute", "too short to tell" if slope is None else f"{slope:.3f}"],
    ]
    return report.Figures("soak", ("", ""), lines)


def plot(rows: list[report.Row], folder: Path) -> None:
    """`soak-memory.svg` and `soak-handles.svg`: samples over minutes."""
    last = max(row["minutes"] for row in rows)
    ticks = {last * step / 5: f"{last * step / 5:.0f}" for step in range(6)}
    shown = [row for row in rows if not row["last"]]

    def series(process: str, column: str, unit: int) -> list[Point]:
        own = [(row["minutes"], row[column] / unit) for row in shown if row["process"] == process]
        return [Point(x, y, y, y) for x, y in own]

    names = {"main": "lives all the time", "side": "killed and restarted"}
    memory = {name: series(process, "rss", 1 << 20) for process, name in names.items()}
    line_plot(folder / "soak-memory.svg", ("Resident memory", "minutes", "MiB"), memory, ticks, linear=True)
    handles = {column: series("main", column, 1) for column in ("descriptors", "threads")}
    line_plot(
        folder / "soak-handles.svg",
        ("Of the process that lives all the time", "minutes", "number"),
        handles,
        ticks,
        linear=True,
    )


def main() -> None:
    """Run, print, draw, and write the JSON."""
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests in a second, of both processes")
    parser.add_argument("--capacity", type=parse_size, default="256MiB", help="of the store")
    parser.add_argument("--segment", type=parse_size, default="16MiB")
    parser.add_argument("--life", type=float, default=0.0, help="seconds between restarts (default: 24 in a run)")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the drive to be used")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="draw it there")
    options = parser.parse_args()
    options.life = options.life or 60 * options.minutes / 24
    base = Path(tempfile.mkdtemp(prefix="tutti-soak-", dir=options.directory))
    settings = {name: getattr(options, name) for name in ("minutes", "rate", "life", "seed")}
    settings |= {"capacity": format_size(options.capacity), "segment": format_size(options.segment)}
    run = report.Report("soak", report.machine(base), settings)
    run.head()
    try:
        soak = Soak(options, base, run)
        try:
            soak.go()
            found = soak.end()
        finally:
            soak.kill()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    figures(run.summary[0]).show()
    for complaint in found:
        run.note(complaint)
    run.write(options.json)
    if options.svg:
        plot(run.rows, options.svg)
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
