"""What the benchmarks of a server share: a workload runs with each cache, before and after a flush and a restart."""

import argparse
import asyncio
import contextlib
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from benchmarks import report
from benchmarks.backends import drop_page_cache
from benchmarks.client import Client, Sample, tokens
from benchmarks.contenders import CONTENDERS, NAMES, environment, launch, refused
from benchmarks.report import Figures, Row, quartiles, ratios
from benchmarks.server import Server
from tutti_sglang.cli.scrape import look
from tutti_sglang.errors import TuttiError

COLUMNS = (
    *("", "n", "TTFT p50 ms", "p99", "baseline / it", "ITL p50 ms", "p99", "prompt", "device", "host", "storage"),
    *("tokens/s", "$ per million"),
)
BASELINES = ("without", "none")
"""What the others are compared with: the first that takes part."""


class Workload(Protocol):
    """What is asked of a server; `seed` decides every token."""

    async def first(self, client: Client, seed: str) -> dict[str, list[Sample]]:
        """The samples of each phase before the caches are emptied."""

    async def again(self, client: Client, seed: str, phase: str) -> dict[str, list[Sample]]:
        """What comes back to it afterwards, by names that begin with `phase`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and how often it is asked."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--url", help="a server that runs already; its caches are flushed")
    place.add_argument("--serve", action="store_true", help="start servers here (default)")
    parser.add_argument("--tiers", default="with,without", help=f"which servers to start: {', '.join(CONTENDERS)}")
    parser.add_argument("--restart", metavar="COMMAND", help="with --url: how to restart that server")
    parser.add_argument("--model", help="for the servers started here (default: the built-in one without a GPU)")
    parser.add_argument("--server-args", default="", help="further SGLang flags for them, in one string")
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/tmp"), help="a directory on the drive of the store"
    )
    parser.add_argument("--rounds", type=int, default=1, help="each with other tokens and servers started anew")
    parser.add_argument("--dollars", type=float, default=0.0, help="what the server costs in an hour")


def main(name: str, options: argparse.Namespace, workload: Workload, settings: dict[str, object]) -> report.Report:
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
                run.rows += _one(run, options, workload, (turn, tier), base / f"{turn}-{tier}")
                run.write(options.json)  # what was measured is kept, whatever becomes of the rest
    finally:
        shutil.rmtree(base, ignore_errors=True)
    run.summary = summarise(run.rows, options.dollars)
    figures(name, run.summary).show()
    run.write(options.json)
    return run


def _one(
    run: report.Report, options: argparse.Namespace, workload: Workload, which: tuple[int, str], folder: Path
) -> list[Row]:
    """One contender's part of a round; why it has none is noted."""
    turn, tier = which
    if reason := refused(tier):
        run.note(f"{tier} does not take part: {reason}")
        return []
    folder.mkdir()
    try:
        phases = asyncio.run(_cycle(run, options, workload, tier, folder, f"{options.seed}/{turn}"))
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        run.note(f"{tier} leaves round {turn}", error)
        return []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [row for phase, samples in phases.items() for row in _rows(turn, tier, phase, samples)]


async def _cycle(
    run: report.Report, options: argparse.Namespace, workload: Workload, tier: str, folder: Path, seed: str
) -> dict[str, list[Sample]]:
    """One server's life: first, flushed, stopped and started, asked again."""
    async with _serving(options, tier, folder) as client:
        phases = {"first restore": await _warm_up(client, f"{seed}/{tier}/first")}
        phases |= await workload.first(client, seed)
        await client.flush()
        phases |= await workload.again(client, seed, "flushed")
        await client.flush()
        moved = Counter(await asyncio.to_thread(tier_figures, client.url))
    if options.url and not options.restart:
        _describe(run, tier, moved)
        run.note("not restarted: give --restart COMMAND, or --serve")
        return phases
    if options.restart:
        subprocess.run(options.restart, shell=True, check=True)
    drop_page_cache(folder)
    async with _serving(options, tier, folder) as client:
        phases["first restore"] += await _warm_up(client, f"{seed}/{tier}/second")
        phases |= await workload.again(client, seed, "restarted")
        moved.update(await asyncio.to_thread(tier_figures, client.url))
    _describe(run, tier, moved)
    return phases


def tier_figures(url: str) -> dict[str, float]:
    """What the tier of a server says it did so far, in bytes and seconds; empty where there is no tier."""
    try:
        found = look(url)
    except TuttiError:
        return {}
    return {
        "read": found.total("tutti_bytes", op="read"),
        "written": found.total("tutti_bytes", op="write"),
        "drive": found.total("tutti_wait_seconds_sum", phase="drive"),
        "bubble": found.total("tutti_load_wait_seconds"),
        "prefill": found.total("tutti_step_seconds", mode="prefill"),
    }


def _describe(run: report.Report, tier: str, moved: Mapping[str, float]) -> None:
    """The tier's own account of a contender's latest round: GB/s of its reads, and how long forward passes waited."""
    if moved:
        rate = moved["read"] / moved["drive"] / 1e9 if moved["drive"] else 0.0
        bubble = moved["bubble"] / moved["prefill"] if moved["prefill"] else 0.0
        run.contenders[tier] = (
            f"read {moved['read'] / 1e9:.2f} GB at {rate:.2f} GB/s, wrote {moved['written'] / 1e9:.2f} GB, "
            f"forward passes waited {moved['bubble']:.2f} s for layers ({bubble:.1%} of prefills)"
        )


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
    server = None if options.url else _server(options, tier, folder)
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


def _server(options: argparse.Namespace, tier: str, folder: Path) -> Server:
    found = launch(tier, folder / "store")
    model = ["--model", options.model] if options.model else []
    arguments = [*found.arguments, *model, *options.server_args.split()]
    return Server(arguments, folder / "log", environment(found))


def _rows(turn: int, tier: str, phase: str, samples: list[Sample]) -> list[Row]:
    base = {"round": turn, "tier": tier, "phase": phase}
    return [base | {"number": i} | msgspec.to_builtins(sample) for i, sample in enumerate(samples)]


def summarise(rows: list[Row], dollars: float = 0.0) -> list[Row]:
    """One line per phase and tier: times in seconds, tokens as sums, rates in tokens per second; `dollars`: of the
    server in an hour."""
    baseline = next((name for name in BASELINES if any(row["tier"] == name for row in rows)), "")
    lines = []
    for phase, tier in dict.fromkeys((row["phase"], row["tier"]) for row in rows):
        own = [row for row in rows if (row["phase"], row["tier"]) == (phase, tier)]
        ttft, gaps = [row["ttft"] for row in own], [gap for row in own for gap in row["gaps"]]
        line: Row = {"phase": phase, "tier": tier, "requests": len(own)}
        line |= {"ttft_p50": _percentile(ttft, 50), "ttft_p99": _percentile(ttft, 99)}
        line |= {"itl_p50": _percentile(gaps, 50), "itl_p99": _percentile(gaps, 99)}
        line |= {name: sum(row[name] for row in own) for name in ("prompt", "device", "host", "storage")}
        line["speedup"] = quartiles(_speedups(rows, phase, tier, baseline)) if tier != baseline else None
        line |= _rates(own, dollars)
        lines.append(line)
    return lines


def _rates(own: list[Row], dollars: float) -> Row:
    """Tokens per second from the first request to the last token, and what a million of them cost; None of runs that
    kept no clock."""
    rounds = {row["round"] for row in own}
    if not all(row.get("begun") for row in own):
        return {"tokens_per_second": None, "dollars_per_million": None}
    seconds = 0.0
    for turn in rounds:
        some = [row for row in own if row["round"] == turn]
        ends = [row["begun"] + row["ttft"] + sum(row["gaps"]) for row in some]
        seconds += max(ends) - min(row["begun"] for row in some)
    rate = sum(row["prompt"] + 1 + len(row["gaps"]) for row in own) / max(seconds, 1e-9)
    return {"tokens_per_second": rate, "dollars_per_million": dollars / 3600 / rate * 1e6}


def _speedups(rows: list[Row], phase: str, tier: str, baseline: str) -> list[float]:
    """Per round: the median TTFT of the baseline over that of the tier."""
    medians = []
    for turn in dict.fromkeys(row["round"] for row in rows):
        for name in (tier, baseline):
            key = (turn, name, phase)
            found = [row["ttft"] for row in rows if (row["round"], row["tier"], row["phase"]) == key]
            if found:
                medians.append({"round": turn, name: statistics.median(found)})
    return ratios(medians, lambda row: row.get(baseline), lambda row: row.get(tier))


def figures(name: str, summary: list[Row]) -> Figures:
    """The table of a run; hits are shares of the prompts' tokens."""
    lines = []
    for line in summary:
        times = [f"{line[key] * 1000:.1f}" for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")]
        shares = [f"{line[key] / line['prompt']:.1%}" for key in ("device", "host", "storage")]
        ratio = report.Quartiles(*line["speedup"]).show() if line["speedup"] else "-"
        rate, cost = line["tokens_per_second"], line["dollars_per_million"]
        ends = [f"{rate:.0f}" if rate else "-", f"{cost:.2f}" if cost else "-"]
        label = f"{line['phase']}, {NAMES.get(line['tier'], line['tier'])}"
        lines.append([label, str(line["requests"]), *times[:2], ratio, *times[2:], str(line["prompt"]), *shares, *ends])
    return Figures(f"{name}: times in ms, hits as shares of the prompt tokens", COLUMNS, lines)


def _percentile(values: list[float], percent: int) -> float:
    """By linear interpolation; of few values, the 99th is nearly the largest."""
    ordered = sorted(values)
    if len(ordered) < 2:
        return ordered[0] if ordered else 0.0
    return statistics.quantiles(ordered, n=100, method="inclusive")[percent - 1]
