"""What chat and long_context share: a workload runs, with and without the tier, before and after flush and restart."""

import argparse
import asyncio
import contextlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec

from benchmarks import report
from benchmarks.backends import drop_page_cache
from benchmarks.client import Client, Sample, tokens
from benchmarks.report import Figures, Row, quartiles, ratios
from benchmarks.server import Server

COLUMNS = ("", "n", "TTFT p50 ms", "p99", "without / with", "ITL p50 ms", "p99", "prompt", "device", "host", "storage")


class Workload(Protocol):
    """What is asked of a server; `seed` decides every token."""

    async def first(self, client: Client, seed: str) -> dict[str, list[Sample]]:
        """The samples of each phase before the caches are emptied."""

    async def again(self, client: Client, seed: str, phase: str) -> list[Sample]:
        """What comes back to it afterwards."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and how often it is asked."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--url", help="a server that runs already; its caches are flushed")
    place.add_argument("--serve", action="store_true", help="start servers with and without the tier (default)")
    parser.add_argument(
        "--tiers", default="with,without", help="which servers to start: with, without the tier, or both"
    )
    parser.add_argument("--restart", metavar="COMMAND", help="with --url: how to restart that server")
    parser.add_argument("--model", help="for the servers started here (default: the built-in one without a GPU)")
    parser.add_argument("--server-args", default="", help="further SGLang flags for them, in one string")
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/tmp"), help="a directory on the drive of the store"
    )
    parser.add_argument("--rounds", type=int, default=1, help="each with other tokens and servers started anew")


def main(name: str, options: argparse.Namespace, workload: Workload, settings: dict[str, object]) -> None:
    """Run all rounds, print and write what came of them."""
    base = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    tiers = ["given"] if options.url else options.tiers.split(",")
    settings = {**settings, "rounds": options.rounds, "server": options.url or options.model or "built-in model"}
    run = report.Report(
        name, report.machine(base), settings | {"seed": options.seed, "server_args": options.server_args}
    )
    run.head()
    try:
        for turn in range(options.rounds):
            for tier in report.rotated(tiers, turn):
                folder = base / f"{turn}-{tier}"
                folder.mkdir()
                phases = asyncio.run(_cycle(run, options, workload, tier, folder, f"{options.seed}/{turn}"))
                run.rows += [row for phase, samples in phases.items() for row in _rows(turn, tier, phase, samples)]
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    run.summary = summarise(run.rows)
    figures(name, run.summary).show()
    run.write(options.json)


async def _cycle(
    run: report.Report, options: argparse.Namespace, workload: Workload, tier: str, folder: Path, seed: str
) -> dict[str, list[Sample]]:
    """One server's life: first, flushed, stopped and started, asked again."""
    async with _serving(options, tier, folder) as client:
        phases = {"first restore": await _warm_up(client, f"{seed}/{tier}/first")}
        phases |= await workload.first(client, seed)
        await client.flush()
        phases["flushed"] = await workload.again(client, seed, "flushed")
        await client.flush()
    if options.url and not options.restart:
        run.note("not restarted: give --restart COMMAND, or --serve")
        return phases
    if options.restart:
        subprocess.run(options.restart, shell=True, check=True)
    drop_page_cache(folder)
    async with _serving(options, tier, folder) as client:
        phases["first restore"] += await _warm_up(client, f"{seed}/{tier}/second")
        phases["restarted"] = await workload.again(client, seed, "restarted")
    return phases


async def _warm_up(client: Client, seed: str) -> list[Sample]:
    """Compute once and restore once, so that what a server loads lazily is seen here and not in what is compared."""
    prompt = tokens(f"{seed}/warm-up", 256)
    await client.generate(prompt, 4)
    await client.flush()
    restored = await client.generate(prompt, 4)
    await client.flush()
    return [restored]


@contextlib.asynccontextmanager
async def _serving(options: argparse.Namespace, tier: str, folder: Path) -> AsyncIterator[Client]:
    """A client of a server that is ready."""
    server = None if options.url else Server(_launch_arguments(options, tier, folder / "store"), folder / "log")
    client = None
    try:
        if server:
            await server.ready()
        client = Client(server.url if server else options.url)
        yield client
    finally:
        if client:
            await client.close()
        if server:
            server.stop()


def _launch_arguments(options: argparse.Namespace, tier: str, store: Path) -> list[str]:
    arguments = ["--without-tier"] if tier == "without" else ["--store", str(store)]
    arguments += ["--model", options.model] if options.model else []
    return [*arguments, "--", *options.server_args.split()] if options.server_args else arguments


def _rows(turn: int, tier: str, phase: str, samples: list[Sample]) -> list[Row]:
    base = {"round": turn, "tier": tier, "phase": phase}
    return [base | {"number": i} | msgspec.to_builtins(sample) for i, sample in enumerate(samples)]


def summarise(rows: list[Row]) -> list[Row]:
    """One line per phase and tier: times in seconds, tokens as sums."""
    lines = []
    for phase, tier in dict.fromkeys((row["phase"], row["tier"]) for row in rows):
        own = [row for row in rows if (row["phase"], row["tier"]) == (phase, tier)]
        ttft, gaps = [row["ttft"] for row in own], [gap for row in own for gap in row["gaps"]]
        line: Row = {"phase": phase, "tier": tier, "requests": len(own)}
        line |= {"ttft_p50": _percentile(ttft, 50), "ttft_p99": _percentile(ttft, 99)}
        line |= {"itl_p50": _percentile(gaps, 50), "itl_p99": _percentile(gaps, 99)}
        line |= {name: sum(row[name] for row in own) for name in ("prompt", "device", "host", "storage")}
        line["without_over_with"] = quartiles(_speedups(rows, phase)) if tier == "with" else None
        lines.append(line)
    return lines


def _speedups(rows: list[Row], phase: str) -> list[float]:
    """Per round: the median TTFT without the tier over that with it."""
    medians = []
    for turn, tier in dict.fromkeys((row["round"], row["tier"]) for row in rows if row["phase"] == phase):
        key = (turn, tier, phase)
        found = [row["ttft"] for row in rows if (row["round"], row["tier"], row["phase"]) == key]
        medians.append({"round": turn, tier: statistics.median(found)})
    return ratios(medians, lambda row: row.get("without"), lambda row: row.get("with"))


def figures(name: str, summary: list[Row]) -> Figures:
    """The table of a run; hits are shares of the prompts' tokens."""
    lines = []
    for line in summary:
        times = [f"{line[key] * 1000:.1f}" for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")]
        shares = [f"{line[key] / line['prompt']:.1%}" for key in ("device", "host", "storage")]
        speedup = line["without_over_with"]
        ratio = report.Quartiles(*speedup).show() if speedup else "-"
        label = (
            f"{line['phase']}, {line['tier']}" if line["tier"] == "given" else f"{line['phase']}, {line['tier']} tier"
        )
        lines.append([label, str(line["requests"]), *times[:2], ratio, *times[2:], str(line["prompt"]), *shares])
    return Figures(f"{name}: times in ms, hits as shares of the prompt tokens", COLUMNS, lines)


def _percentile(values: list[float], percent: int) -> float:
    """By linear interpolation; of few values, the 99th is nearly the largest."""
    ordered = sorted(values)
    if len(ordered) < 2:
        return ordered[0] if ordered else 0.0
    return statistics.quantiles(ordered, n=100, method="inclusive")[percent - 1]
