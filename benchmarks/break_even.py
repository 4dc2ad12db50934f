"""Load or recompute, on a fast disk and on one that is made slow: a stored prompt must never be slower than a new one.

In each round a prompt that nobody asked before and one that is stored take turns, at each length. Once with the tier's
break-even, and once without it, where whatever is stored is loaded. The disk is made slow by a plugin that sleeps after
each read of the native engine; the tier is told nothing.
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path

from benchmarks import report, slow_disk
from benchmarks.client import Client, tokens
from benchmarks.report import Row, quartiles
from benchmarks.server import Server

LEARN = (200, 700, 1500, 3000)
"""Lengths of prompts from which a server learns what prefills and loads take."""
AGAIN = 3
"""Prompts from which it learns that the disk is another."""
DISKS = ("fast", "slow")


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", default="512,1024,2048,4096", help="lengths of the prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow", type=float, default=3000.0, help="nanoseconds a byte that a slow disk adds")
    parser.add_argument("--break-even", default="on,off", help="settings to compare")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the drive of the store")
    options = parser.parse_args()
    options.lengths = [int(each) for each in options.tokens.split(",")]
    base = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    settings = {name: getattr(options, name) for name in ("tokens", "rounds", "slow", "seed")}
    run = report.Report("break_even", report.machine(base), settings)
    run.head()
    try:
        for setting in options.break_even.split(","):
            run.rows += asyncio.run(_serve(options, setting, base / setting))
            run.summary = summarise(run.rows)
            run.write(options.json)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    figures(run.summary).show()


async def _serve(options: argparse.Namespace, setting: str, folder: Path) -> list[Row]:
    """One server's life: it learns, is asked, the disk becomes slow, it learns, is asked."""
    slow = folder / "nanoseconds a byte"
    slow_disk.install(folder / "plugin")
    paths = [str(folder / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), slow_disk.VARIABLE: str(slow)}
    extra = {"storage_dirs": [str(folder / "store")], "max_size": "2GiB", "break_even": setting}
    flags = ["--hicache-storage-backend-extra-config", json.dumps(extra)]
    server = Server([*flags, "--hicache-storage-prefetch-policy", "wait_complete"], folder / "log", environ)
    rows: list[Row] = []
    client = None
    try:
        await server.ready()
        client = Client(server.url)
        for disk, lengths in zip(DISKS, (LEARN, AGAIN * (300,)), strict=True):
            if disk == "slow":
                slow.write_text(str(options.slow))
            for number, length in enumerate(lengths):
                await _stored(client, tokens(f"{options.seed}/{disk}/learn/{number}", length))
            for turn in range(options.rounds):
                for length in options.lengths:
                    base = {"round": turn, "break_even": setting, "disk": disk, "tokens": length}
                    for what, row in (await _pair(client, f"{options.seed}/{disk}/{turn}", length, turn)).items():
                        rows.append({**base, "what": what, **row})
    finally:
        if client:
            await client.close()
        server.stop()
    return rows


async def _stored(client: Client, prompt: list[int]) -> Row:
    """Compute a prompt, have it stored, and ask again."""
    await client.generate(prompt, 2)
    await client.flush()
    again = await client.generate(prompt, 2)
    return {"ttft": again.ttft, "storage": again.storage}


async def _pair(client: Client, seed: str, length: int, turn: int) -> dict[str, Row]:
    """A stored prompt and a new one; who is first takes turns."""
    found: dict[str, Row] = {}
    for what in report.rotated(("stored", "new"), turn):
        prompt = tokens(f"{seed}/{what}/{length}", length)
        if what == "stored":
            found[what] = await _stored(client, prompt)
        else:
            await client.flush()
            new = await client.generate(prompt, 2)
            found[what] = {"ttft": new.ttft, "storage": new.storage}
    return found


def summarise(rows: list[Row]) -> list[Row]:
    """A line for each setting, disk and length: medians in seconds, per-round ratios, tokens from storage."""
    lines = []
    for case in dict.fromkeys((row["break_even"], row["disk"], row["tokens"]) for row in rows):
        own = [row for row in rows if (row["break_even"], row["disk"], row["tokens"]) == case]
        stored, new = ([row for row in own if row["what"] == what] for what in ("stored", "new"))
        ratios = report.ratios(
            own,
            lambda row: row["ttft"] if row["what"] == "stored" else None,
            lambda row: row["ttft"] if row["what"] == "new" else None,
        )
        lines.append(
            {
                **dict(zip(("break_even", "disk", "tokens"), case, strict=True)),
                "stored": quartiles(row["ttft"] for row in stored),
                "new": quartiles(row["ttft"] for row in new),
                "stored_over_new": quartiles(ratios),
                "loaded": sum(row["storage"] for row in stored) / (len(stored) * case[2]),
            }
        )
    return lines


def figures(summary: list[Row]) -> report.Figures:
    """The table of a run."""
    columns = ("break-even, disk, tokens", "stored, ms", "new, ms", "stored / new", "of its tokens loaded")
    lines = []
    for line in summary:
        times = [report.Quartiles(*(1e3 * each for each in line[key])).show("{:.0f}") for key in ("stored", "new")]
        name = f"{line['break_even']}, {line['disk']}, {line['tokens']}"
        ratio = report.Quartiles(*line["stored_over_new"]).show()
        lines.append([name, *times, ratio, f"{line['loaded']:.0%}"])
    return report.Figures("time to first token: median and quartiles", columns, lines)


if __name__ == "__main__":
    main()
