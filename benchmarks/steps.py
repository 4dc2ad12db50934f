"""What following SGLang's scheduler costs in each of its steps: the hooks as SGLang installs them, around nothing.

Goal: microseconds of run_batch, process_batch_result and on_idle with hooks, less those without.
"""

import sys
import time
import types
import uuid
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry

from benchmarks import report
from tutti_sglang.engine.rows import Rows
from tutti_sglang.engine.window import Window
from tutti_sglang.integration.scheduler_hooks import SCHEDULER_HOOKS
from tutti_sglang.metrics import Metrics
from tutti_sglang.schedule.gate import process_gate
from tutti_sglang.schedule.slack import Table

SPAN = 20
MODULE = "tutti_benchmark_scheduler"


class Scheduler:
    """The three methods, doing nothing."""

    device = "cpu"

    def run_batch(self, batch: Any) -> None:
        """A step."""

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Its end."""

    def on_idle(self) -> None:
        """No step."""


class Hooked(Scheduler):
    """The same with hooks."""

    run_batch, process_batch_result, on_idle = (
        types.FunctionType(each.__code__, each.__globals__, each.__name__)
        for each in (Scheduler.run_batch, Scheduler.process_batch_result, Scheduler.on_idle)
    )


class Batch:
    """What the hooks look at."""

    def __init__(self, mode: ForwardMode, requests: int) -> None:
        self.forward_mode = mode
        self.extend_lens, self.prefix_lens = [128] * requests, [1024] * requests


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    run = report.Report("steps", report.machine(Path("/dev/shm")), {"steps": options.steps, "rounds": options.rounds})
    run.head()
    window = _install()
    try:
        for turn in range(options.rounds):
            for name, batch in (
                ("decode", Batch(ForwardMode.DECODE, 32)),
                ("prefill of 1", Batch(ForwardMode.EXTEND, 1)),
                ("prefill of 32", Batch(ForwardMode.EXTEND, 32)),
                ("idle", None),
            ):
                plain = _seconds(Scheduler(), batch, options.steps)
                hooked = _seconds(Hooked(), batch, options.steps)
                run.rows.append({"round": turn, "step": name, "microseconds": (hooked - plain) * 1e6})
    finally:
        window.close()
    run.summary = summarise(run.rows)
    figures(run.summary).show()
    run.write(options.json)


def summarise(rows: list[report.Row]) -> list[report.Row]:
    """A line for each kind of step."""
    return [
        {"step": name, "microseconds": report.quartiles(row["microseconds"] for row in rows if row["step"] == name)}
        for name in dict.fromkeys(row["step"] for row in rows)
    ]


def figures(summary: list[report.Row]) -> report.Figures:
    """The table of a run."""
    lines = [[line["step"], report.Quartiles(*line["microseconds"]).show("{:.1f}")] for line in summary]
    return report.Figures("added to a step, µs: median and quartiles", ["", "µs"], lines)


def _install() -> Window:
    module = types.ModuleType(MODULE)
    module.Scheduler = Hooked  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    for hook in SCHEDULER_HOOKS:
        HookRegistry.register(f"{MODULE}.Scheduler.{hook.target.rpartition('.')[2]}", hook.function, hook.kind)
    HookRegistry.apply_hooks()
    window = Window(Rows(uuid.uuid4().hex), Metrics(CollectorRegistry()), (0, 1))
    process_gate().attach(window)
    process_gate().clockwork = table = Table({})
    for new in (64, 128, 512, 1024, 4096):
        for prefix in (0, 1024):
            table.observe(new, prefix, 1e-5 * new)
    return window


def _seconds(scheduler: Scheduler, batch: Batch | None, steps: int) -> float:
    """Of one step: launched and processed; None: of a pass without a step. The fastest of many short spans, for what
    else runs on the machine is none of its cost."""
    run, process, idle = scheduler.run_batch, scheduler.process_batch_result, scheduler.on_idle

    def span() -> float:
        start = time.perf_counter()
        for _ in range(SPAN):
            if batch is None:
                idle()
            else:
                run(batch)
                process(batch, None)
        return (time.perf_counter() - start) / SPAN

    return min(span() for _ in range(max(1, steps // SPAN)))


if __name__ == "__main__":
    main()
