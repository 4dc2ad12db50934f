"""A queue of long prompts whose KV is stored: arrival to first token with and without reading ahead, by the linker.

Goal: what preloading gains while requests wait, and a picture of one load, I/O beside compute, layer by layer. The
linker, its store and SGLang's device pool on the CPU are real; the scheduler is a loop that makes its calls in its
order, and a layer of the forward pass is a wait, since on a GPU it does not take the CPU's time either.
Not a goal: a model's own speed (`benchmarks.long_context` measures servers).
"""

import argparse
import contextlib
import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.timeline import Bar, timeline
from tutti_sglang.units import format_size

PAGE, HEADS, WIDTH = 64, 8, 128
PATIENCE = 60.0
MODES = {"preload": "1GiB", "no preload": "0"}


class Load(NamedTuple):
    """What happened to a request: seconds since it arrived; of each layer when its bytes were there, when the forward
    pass asked for it, and when it had computed it."""

    ttft: float
    started: float
    ready: list[float]
    asked: list[float]
    computed: list[float]


class World:
    """A device pool of SGLang's, and linkers on one store."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        self._options, self._folder = options, folder
        pages = options.pages * options.requests
        shape = {"size": pages * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, "head_num": HEADS}
        shape |= {"head_dim": WIDTH, "layer_num": options.layers, "device": "cpu", "enable_memory_saver": False}
        self.pool = MHATokenToKVPool(**shape)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.view(torch.int16).random_()

    @contextlib.contextmanager
    def linker(self, preload: str) -> Iterator[Any]:
        """As SGLang's factory makes it."""
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        from tutti_sglang.integration.linker import TuttiLinker

        pool = self.pool
        allocator = PagedTokenToKVPoolAllocator(pool.size, PAGE, torch.bfloat16, "cpu", pool, need_sort=False)
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=PAGE
        )
        settings = {"storage_dirs": [str(self._folder / "store")], "max_size": "8GiB", "preload": preload}
        settings |= {"min_free_space": 1, "break_even": "off", "engine": self._options.engine}
        made = TuttiLinker(None, params, components={ComponentType.FULL}, extra_config=settings, forward_stream=None)
        try:
            yield made
        finally:
            made.close()

    def names(self, request: int) -> list[str]:
        """Keys of the pages of a request's prompt."""
        first = request * self._options.pages
        return [hashlib.sha256(str(page).encode()).hexdigest() for page in range(first, first + self._options.pages)]

    def slots(self, request: int) -> torch.Tensor:
        """Where they lie in the pool."""
        first = 1 + request * self._options.pages
        return torch.arange(first * PAGE, (first + self._options.pages) * PAGE)

    def transfers(self, request: int, *, placed: bool = False) -> list[Any]:
        """As SGLang's tree makes them."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        return [
            PoolTransfer(
                name=PoolName.KV,
                keys=self.names(request),
                device_indices=self.slots(request) if placed else None,
            )
        ]


def store_all(world: World, linker: Any, requests: int) -> None:
    """Every prompt is on the drives."""
    for request in range(requests):
        assert linker.offload(world.transfers(request, placed=True))
        while not linker.num_completed_offloads():
            time.sleep(0.01)
        assert linker.pop_completed_offload()
    linker.flushed()


def serve(world: World, linker: Any, options: argparse.Namespace) -> list[Load]:
    """All requests arrive at once, behind other work, and are served one after the other when their pages are there."""
    arrival, queue = time.monotonic(), list(range(options.requests))
    for request in queue:
        with linker.arriving(str(request)):
            linker.lookup(str(request), world.transfers(request))
        linker.arrive(str(request), 0)
    time.sleep(options.busy_ms / 1e3)  # what they wait for
    loads = []
    while queue:
        held = linker.held([str(request) for request in queue])
        ready = [request for request in queue if str(request) not in held]
        if not ready:
            linker.idle(0.002)
            continue
        queue.remove(ready[0])
        loads.append(_forward(world, linker, ready[0], arrival, options))
    return loads


def _forward(world: World, linker: Any, request: int, arrival: float, options: argparse.Namespace) -> Load:
    found = max(linker.lookup(str(request), world.transfers(request)), default=0)
    assert found == options.pages, f"{found} of {options.pages} pages"
    assert linker.load(str(request), world.transfers(request, placed=True))
    started = time.monotonic() - arrival
    index = linker.start_layer_wise_loading()
    counter = linker.layer_done_counter
    batch = counter.batch(index)
    counter.set_consumer(index)
    asked, computed = [], []
    for layer in range(options.layers):
        asked.append(time.monotonic() - arrival)
        counter.wait_until(layer)
        time.sleep(options.layer_ms / 1e3)
        computed.append(time.monotonic() - arrival)
    assert linker.finish_layer_wise_loading(index)
    return Load(time.monotonic() - arrival, started, [at - arrival for at in batch.times], asked, computed)


def picture(path: Path, options: argparse.Namespace, loads: dict[str, list[Load]]) -> None:
    """One request of each mode: when its layers were on their way, waited for and computed."""
    rows: dict[str, list[Bar]] = {}
    for mode, mine in loads.items():
        load = mine[-1]
        begins = [load.started, *load.ready[:-1]]
        rows[f"{mode}: copy" if mode == "preload" else f"{mode}: read"] = [
            Bar(begin, end, str(layer), 0) for layer, (begin, end) in enumerate(zip(begins, load.ready, strict=True))
        ]
        waits = [max(ask, ready) for ask, ready in zip(load.asked, load.ready, strict=True)]
        rows[f"{mode}: compute"] = [
            Bar(begin, end, str(layer), 1) for layer, (begin, end) in enumerate(zip(waits, load.computed, strict=True))
        ]
    size = format_size(2 * PAGE * HEADS * WIDTH * 2 * options.pages)
    timeline(path, f"One prompt of {options.pages * PAGE} tokens, {size} a layer; bars are layers", rows)


def main() -> None:
    """Measure, print, and write the JSON and the picture."""
    parser = report.parser(__doc__)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--pages", type=int, default=16, help=f"of {PAGE} tokens, of each prompt")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer-ms", type=float, default=10.0, help="that the forward pass takes for a layer")
    parser.add_argument("--busy-ms", type=float, default=1000.0, help="that the device is busy when they arrive")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="a directory on the drive")
    parser.add_argument("--picture", type=Path, help="an SVG of one request of each mode, in the last round")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    names = ("requests", "pages", "layers", "layer_ms", "busy_ms", "engine", "rounds")
    run = report.Report("preload", report.machine(folder), {name: getattr(options, name) for name in names})
    run.head()
    try:
        world = World(options, folder)
        with world.linker("0") as linker:
            store_all(world, linker, options.requests)
        loads: dict[str, list[Load]] = {}
        for turn in range(options.rounds):
            for mode in report.rotated(list(MODES), turn):
                with world.linker(MODES[mode]) as linker:
                    loads[mode] = serve(world, linker, options)
                run.rows += [
                    {"round": turn, "mode": mode, "number": number, "ttft": load.ttft}
                    for number, load in enumerate(loads[mode])
                ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    run.summary = summarise(run.rows)
    figures(run.summary).show()
    run.write(options.json)
    if options.picture:
        picture(options.picture, options, {mode: loads[mode] for mode in reversed(MODES)})


def summarise(rows: list[report.Row]) -> list[report.Row]:
    """By place in the queue: medians of both modes, and quartiles of their ratio by round."""
    lines = []
    for number in sorted({row["number"] for row in rows}):
        mine = [row for row in rows if row["number"] == number]
        by_mode = {mode: [row["ttft"] for row in mine if row["mode"] == mode] for mode in MODES}
        pairs = [{"round": row["round"], row["mode"]: row["ttft"]} for row in mine]
        ratio = report.ratios(pairs, lambda row: row.get("no preload"), lambda row: row.get("preload"))
        line: report.Row = {"number": number + 1, "gain": report.quartiles(ratio)}
        lines.append(line | {mode: statistics.median(values) for mode, values in by_mode.items()})
    return lines


def figures(summary: list[report.Row]) -> report.Figures:
    """The table of a run."""
    lines = [
        [
            str(line["number"]),
            *(f"{line[mode] * 1e3:.0f}" for mode in MODES),
            report.Quartiles(*line["gain"]).show() if line["gain"] else "-",
        ]
        for line in summary
    ]
    return report.Figures("preload: arrival to first token, ms", ("in the queue", *MODES, "without / with"), lines)


if __name__ == "__main__":
    main()
