"""`make bench`: a small set of requests against a server with each cache, in one report.

No cache at all, device memory alone, host memory, SGLang's `file` and `nixl`, and this tier by its two paths; the same
model, page size and prompts. Long prompts that do not fit the device together, questions behind shared prefixes, and
chats; all of it again after a flush and after a restart. Before it, what the drive gives to fio.

Goal: where a machine stands, in a quarter of an hour. Not a goal: a fine figure; the single benchmarks have rounds.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import report, serving
from benchmarks.chat import Chat
from benchmarks.client import Client, Sample
from benchmarks.contenders import CONTENDERS, NAMES
from benchmarks.long_context import LongContext
from benchmarks.plot import bar_plot
from benchmarks.shared_prefix import SharedPrefix
from tutti_sglang.cli.fio import Fio

DEVICE_TOKENS = 8192
"""Of the server's KV pool: less than the long prompts need, so that host memory shows."""
PAGE, PAGES = 2 << 20, 64
SHOWN = ("long: cold", "long: hot", "long: flushed", "long: restarted")


class Set:
    """Several workloads in one server's life."""

    def __init__(self, scale: float) -> None:
        common = {"output": 8}
        long = argparse.Namespace(tokens=int(2560 * scale), prompts=4, reuse=1.0, data=None, **common)
        prefix = argparse.Namespace(groups=2, each=3, tokens=int(1536 * scale), question=48, parallel=2, **common)
        chat = argparse.Namespace(clients=2, turns=3, system=int(512 * scale), turn_tokens=int(192 * scale), **common)
        self._parts: dict[str, serving.Workload] = {
            "long": LongContext(long),
            "prefix": SharedPrefix(prefix),
            "chat": Chat(chat),
        }

    async def first(self, client: Client, seed: str) -> dict[str, list[Sample]]:
        """One after the other."""
        found = {}
        for name, part in self._parts.items():
            found |= {
                f"{name}: {phase}": samples for phase, samples in (await part.first(client, f"{seed}/{name}")).items()
            }
        return found

    async def again(self, client: Client, seed: str, phase: str) -> dict[str, list[Sample]]:
        """Likewise."""
        found = {}
        for name, part in self._parts.items():
            found |= {
                f"{name}: {each}": got for each, got in (await part.again(client, f"{seed}/{name}", phase)).items()
            }
        return found


def main() -> None:
    """Measure, print, draw, and write the JSON."""
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    serving.add_options(parser)
    parser.set_defaults(tiers=",".join(CONTENDERS), server_args=f"--max-total-tokens {DEVICE_TOKENS}")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the times to the first token there")
    options = parser.parse_args()
    settings: dict[str, object] = {"scale": options.scale, **baseline(options.directory)}
    run = serving.main("compare", options, Set(options.scale), settings)
    if options.svg:
        plot(run.summary, options.svg)


def baseline(directory: Path) -> dict[str, object]:
    """GB/s that the drive gives to fio, read and written; why there is no figure."""
    with tempfile.TemporaryDirectory(prefix="tutti-bench-", dir=directory) as folder:
        try:
            fio = Fio(Path(folder) / "fio", PAGE, PAGES, {})
            rows = {name: fio.measure(operation, "idle") for name, operation in (("write", "put"), ("read", "get"))}
        except RuntimeError as error:
            return {"fio": str(error)}
        return {f"fio {name} GB/s": round(row["bytes"] / row["seconds"] / 1e9, 2) for name, row in rows.items()}


def plot(summary: list[report.Row], path: Path) -> None:
    """Median times to the first token of the long prompts, by where they came from."""
    series: dict[str, dict[str, float]] = {}
    for line in summary:
        if line["phase"] in SHOWN:
            name = NAMES.get(line["tier"], line["tier"]).replace("`", "")
            series.setdefault(name, {})[line["phase"].removeprefix("long: ")] = 1000 * line["ttft_p50"]
    bar_plot(path, ("Time to first token of long prompts, median", "", "ms"), series)


if __name__ == "__main__":
    main()
