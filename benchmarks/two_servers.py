"""Time to first token of a prompt at a node that stored it, at another node of its fleet, and where nobody has it.

`python -m benchmarks.two_servers` starts a Mooncake master, a client that lends memory, and two servers with stores of
their own. The prompts of a round are asked at one server (computed), after a flush there again (local), and at the
other server (peer); break-even is off, so that all that is stored is loaded, whether it pays or not.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.client import Client, Sample, tokens
from benchmarks.report import Figures, Row, quartiles
from benchmarks.server import Server
from tutti_sglang.cli.scrape import look
from tutti_sglang.integration.launch import free_port

PHASES = ("computed", "local", "peer")
PAGE = 64
PUBLISH_SECONDS = 60.0


@contextlib.contextmanager
def mooncake(folder: Path) -> Iterator[str]:
    """The address of a master of a fleet with memory, until the end of the block. ImportError without the wheel."""
    import mooncake as wheel

    programs, port = Path(wheel.__file__).parent, free_port()
    address = f"127.0.0.1:{port}"
    lender = ["--host", "127.0.0.1", "--global_segment_size", "1 GB", "--master_server_address", address]
    lender += ["--metadata_server", "P2PHANDSHAKE", "--port", str(free_port()), "--protocol", "tcp"]
    commands = (
        [programs / "mooncake_master", "--rpc_port", str(port), "--metrics_port", str(free_port())],
        [programs / "mooncake_client", *lender],
    )
    with contextlib.ExitStack() as stack, (folder / "mooncake.log").open("ab") as log:
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            stack.callback(process.kill)
        yield address


@contextlib.asynccontextmanager
async def serving(folder: Path, address: str) -> AsyncIterator[list[Client]]:
    """Clients of two servers that have joined the fleet."""
    servers, clients = [], []
    try:
        for name in ("one", "two"):
            peer = {"kind": "mooncake", "master": address, "protocol": "tcp", "publish": "all", "memory": "64MiB"}
            extra = {"storage_dirs": [str(folder / name)], "max_size": "4GiB", "peer": peer, "break_even": "off"}
            flags = ["--hicache-storage-backend-extra-config", json.dumps(extra)]
            flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
            servers.append(Server(["--store", str(folder / name), *flags], folder / f"{name}.log"))
            await servers[-1].ready()
            clients.append(Client(servers[-1].url))
            await _until(clients[-1], "tutti_peer_in_service", 1)
        yield clients
    finally:
        for client in clients:
            await client.close()
        for server in servers:
            server.stop()


async def _until(client: Client, metric: str, value: float, **labels: str) -> None:
    """RuntimeError when it does not come to that."""
    for _ in range(int(PUBLISH_SECONDS / 0.1)):
        if (await asyncio.to_thread(look, client.url)).total(metric, **labels) >= value:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{metric} of {client.url} did not come to {value:g} in {PUBLISH_SECONDS:.0f} s")


async def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """A row per request. RuntimeError when a phase did not find what it is about, or found other tokens."""
    rows: list[Row] = []
    published = 0
    with mooncake(folder) as address:
        async with serving(folder, address) as (one, two):
            for turn in range(-1, options.rounds):  # the first is for what a server does once
                found: dict[str, list[Sample]] = {phase: [] for phase in PHASES}
                prompts = [tokens(f"{options.seed}/{turn}/{i}", options.tokens) for i in range(options.prompts)]
                found["computed"] = [await one.generate(prompt, options.output) for prompt in prompts]
                published += options.prompts * ((options.tokens + options.output - 1) // PAGE)
                await _until(one, "tutti_peer_objects", published, op="publish", outcome="stored")
                await one.flush()
                found["local"] = [await one.generate(prompt, options.output) for prompt in prompts]
                found["peer"] = [await two.generate(prompt, options.output) for prompt in prompts]
                _check(found)
                if turn >= 0:
                    rows += [
                        {"round": turn, "phase": phase, "number": i} | msgspec.to_builtins(sample)
                        for phase in PHASES
                        for i, sample in enumerate(found[phase])
                    ]
    return rows


def _check(found: dict[str, list[Sample]]) -> None:
    for computed, local, peer in zip(*(found[phase] for phase in PHASES), strict=True):
        if not computed.reply == local.reply == peer.reply:
            raise RuntimeError("one prompt got different tokens")
        if computed.storage or min(local.storage, peer.storage) < computed.prompt // 2:
            raise RuntimeError(f"loaded {computed.storage}, {local.storage}, {peer.storage} tokens, not none, all, all")


def figures(rows: list[Row]) -> Figures:
    """TTFT of each phase in ms, over all rounds, and what share of the prompts came from storage."""
    lines = []
    for phase in PHASES:
        own = [row for row in rows if row["phase"] == phase]
        times = quartiles(row["ttft"] * 1e3 for row in own)
        share = sum(row["storage"] for row in own) / sum(row["prompt"] for row in own)
        lines.append([phase, str(len(own)), times.show("{:.0f}") if times else "-", f"{share:.0%}"])
    return Figures("two servers: TTFT in ms, median (quartiles)", ("", "n", "TTFT", "from storage"), lines)


def main() -> None:
    """Measure, print, keep."""
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=3, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=8, help="tokens of each reply")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="for the stores")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    settings = {name: getattr(options, name) for name in ("tokens", "prompts", "rounds", "output", "seed")}
    run = report.Report("two_servers", report.machine(folder), settings | {"server": "built-in model"})
    run.head()
    try:
        run.rows = asyncio.run(measure(options, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures(run.rows).show()
    run.write(options.json)


if __name__ == "__main__":
    main()
