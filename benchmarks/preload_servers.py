"""A queue of long stored prompts at real servers on the direct path: arrival to first token with and without preload.

Two servers share one store, where every prompt lies; the one reads ahead for requests that wait, the other reads each
layer while it computes (`preload = 0`). In turns each gets a prompt that nobody has seen, and behind it, while it is
computed, the whole queue at once; one request runs at a time. Break-even is off: all that is stored is loaded. The disk
is made slow by a plugin that sleeps where the store calls its engine, so that there is something to wait for: the
built-in model has little KV, and the CPU takes long to compute it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks import report, slow_disk
from benchmarks.client import Client, Sample, tokens
from benchmarks.preload import MODES, summarise
from benchmarks.report import Figures, Row
from benchmarks.server import Server

DISKS = ("fast", "slow")
AHEAD_SECONDS = 0.1
"""So long the prompt before the queue has been there when the queue arrives."""
STAGGER_SECONDS = 0.005
"""Between two of the queue, so that their order is known."""


@contextlib.asynccontextmanager
async def serving(folder: Path, slow: Path) -> AsyncIterator[dict[str, Client]]:
    """A client of each mode's server."""
    slow_disk.install(folder / "plugin")
    paths = [str(folder / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), slow_disk.VARIABLE: str(slow)}
    store = {"storage_dirs": [str(folder / "store")], "max_size": "4GiB"}
    servers, clients = [], dict[str, Client]()
    try:
        for mode, preload in MODES.items():
            extra = {"path": "direct", **store, "preload": preload, "break_even": "off"}
            flags = ["--hicache-storage-backend-extra-config", json.dumps(extra), "--max-running-requests", "1"]
            flags += ["--sleep-on-idle"]  # the other server leaves the processor to this one
            servers.append(Server(flags, folder / f"{mode}.log", environ))
            await servers[-1].ready()
            clients[mode] = Client(servers[-1].url)
        yield clients
    finally:
        for client in clients.values():
            await client.close()
        for server in servers:
            server.stop()


async def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """A row per request of the queue. RuntimeError where a prompt was not loaded, or got other tokens."""
    rows: list[Row] = []
    slow = folder / "nanoseconds a byte"
    prompts = [tokens(f"{options.seed}/queue/{i}", options.tokens) for i in range(options.requests)]
    async with serving(folder, slow) as clients:
        first = next(iter(clients.values()))
        computed = [await first.generate(prompt, options.output) for prompt in prompts]
        await first.flush()
        for disk in DISKS:
            if disk == "slow":
                slow.write_text(str(options.slow))
            for turn in range(-1, options.rounds):  # the first is for what a server does once
                for mode in report.rotated(list(MODES), turn):
                    seed = f"{options.seed}/{disk}/{turn}/{mode}"
                    found = await queue(clients[mode], tokens(seed, options.busy), prompts, options.output)
                    _check(computed, found)
                    base = {"round": turn, "disk": disk, "mode": mode}
                    rows += [
                        base | {"number": number, "ttft": each.ttft, "storage": each.storage}
                        for number, each in enumerate(found)
                        if turn >= 0
                    ]
    return rows


async def queue(client: Client, before: list[int], prompts: list[list[int]], output: int) -> list[Sample]:
    """The samples of a queue, behind a prompt that nobody has."""
    await client.flush()
    busy = asyncio.create_task(client.generate(before, 1))
    await asyncio.sleep(AHEAD_SECONDS)
    waiting = []
    for prompt in prompts:
        waiting.append(asyncio.create_task(client.generate(prompt, output)))
        await asyncio.sleep(STAGGER_SECONDS)
    found = [await each for each in waiting]
    await busy
    return found


def _check(computed: list[Sample], found: list[Sample]) -> None:
    for one, other in zip(computed, found, strict=True):
        if one.reply != other.reply:
            raise RuntimeError("one prompt got different tokens")
        if other.storage < one.prompt // 2:
            raise RuntimeError(f"{other.storage} of {one.prompt} tokens came from the storage")


def figures(rows: list[Row]) -> Figures:
    """By disk and place in the queue: medians of both modes, and their ratio by round."""
    lines = []
    for disk in DISKS:
        for line in summarise([row for row in rows if row["disk"] == disk]):
            ratio = report.Quartiles(*line["gain"]).show() if line["gain"] else "-"
            lines.append([f"{disk}, {line['number']}", *(f"{line[mode] * 1e3:.0f}" for mode in MODES), ratio])
    columns = ("disk, place in the queue", *MODES, "without / with")
    return Figures("a queue at real servers: arrival to first token, ms", columns, lines)


def main() -> None:
    """Measure, print, keep."""
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=4, help="of the queue")
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--busy", type=int, default=6000, help="tokens of the prompt before the queue")
    parser.add_argument("--slow", type=float, default=30.0, help="nanoseconds a byte that a slow disk adds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=4, help="tokens of each reply")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the drive of the store")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    names = ("requests", "tokens", "busy", "slow", "rounds", "output", "seed")
    settings = {name: getattr(options, name) for name in names}
    run = report.Report("preload_servers", report.machine(folder), settings | {"server": "built-in model"})
    run.head()
    try:
        run.rows = asyncio.run(measure(options, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures(run.rows).show()
    run.write(options.json)


if __name__ == "__main__":
    main()
