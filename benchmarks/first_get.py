"""What the first batches of a process cost, where the store was made ready when it was attached and where it was not.

Goal: milliseconds of the first, second … lookup and get, each in a process of its own that has just opened the store.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks import report
from tutti_sglang.config import Config
from tutti_sglang.memory import Region
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import Namespace, ObjectStore

TENSORS, TENSOR = 4, 64 << 10
READY_SECONDS = 1.0
"""Between attaching and the first request: no server has one sooner."""


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--pages", type=int, default=15, help="of 256 KiB, in a batch")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("pages", "batches", "rounds")}
    run = report.Report("first_get", report.machine(options.directory), settings)
    run.head()
    folder = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    try:
        _child("fill", folder, options)
        for turn in range(options.rounds):
            for way in report.rotated(("ready", "not ready"), turn):
                run.rows += [{"round": turn, "way": way} | row for row in _child(way, folder, options)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    run.summary = summarise(run.rows)
    figures(run.summary).show()
    run.write(options.json)


def summarise(rows: list[report.Row]) -> list[report.Row]:
    """A line for each batch, the first ones first."""
    kinds = sorted({(row["batch"], row["way"]) for row in rows}, key=lambda kind: (kind[0], kind[1] != "ready"))
    return [
        {"batch": batch, "way": way}
        | {
            name: report.quartiles(row[name] for row in rows if (row["batch"], row["way"]) == (batch, way))
            for name in ("lookup_ms", "get_ms", "cpu_ms", "faults")
        }
        for batch, way in kinds
    ]


def figures(summary: list[report.Row]) -> report.Figures:
    """The table of a run."""
    head = ["batch", "store", "lookup ms", "get ms", "of both ms of CPU", "page faults"]
    lines = [
        [str(line["batch"] + 1), line["way"]]
        + [report.Quartiles(*line[name]).show("{:.1f}") for name in ("lookup_ms", "get_ms", "cpu_ms")]
        + [report.Quartiles(*line["faults"]).show("{:.0f}")]
        for line in summary
    ]
    return report.Figures("the first batches of a process: median and quartiles", head, lines)


def _child(way: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.first_get", "--child", way, str(folder)]
    command += [str(options.pages), str(options.batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def _live(way: str, folder: Path, pages: int, batches: int) -> list[dict[str, Any]]:
    """The life of a process: fill the store, or read it batch by batch."""
    config = Config(storage_dirs=(str(folder / "store"),), max_size=1 << 30, min_free_space=0)
    store = ObjectStore(config, metrics=Metrics(CollectorRegistry()))
    tensors = (TENSOR,) * TENSORS
    ns = store.attach(Namespace(model="m", weights="w", dtype="bfloat16", page_size=64, tensors=tensors, layers=(0, 2)))
    region = Region(pages * sum(tensors))
    region.view[:] = np.random.default_rng(1).integers(0, 256, region.size, dtype=np.uint8)
    place = np.arange(pages)[:, None] * sum(tensors) + np.arange(TENSORS) * TENSOR
    rows, found = (region.address + place).astype(np.uint64), list[dict[str, Any]]()
    if way == "ready":
        store.warm(ns)
    time.sleep(READY_SECONDS)
    for batch in range(batches):
        keys = b"".join((1 + batch * pages + page).to_bytes(32, "big") for page in range(pages))
        until = time.monotonic() + 8
        if way == "fill":
            assert store.put(ns, keys, rows, until).all()
            continue
        cpu, faults, start = time.process_time(), _faults(), time.perf_counter()
        assert store.lookup(ns, keys).all()
        looked_up = time.perf_counter()
        assert store.get(ns, keys, rows, until).all()
        row = {"batch": batch, "lookup_ms": looked_up - start, "get_ms": time.perf_counter() - looked_up}
        row["cpu_ms"] = time.process_time() - cpu
        found.append({k: v if k == "batch" else 1e3 * v for k, v in row.items()} | {"faults": _faults() - faults})
    assert store.close()
    return found


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(_live(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))))
    else:
        main()
