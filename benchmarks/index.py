"""The index alone: opening, lookups and publishes at full size, idle and beside a thread that is busy with Python.

Goal: what every batch pays before a byte moves: a lookup asks which keys are there, a get asks for their records too.
Both are timed for runs, keys that were put together, and for keys from all over; by the table in memory, which takes a
while to load, and by the B-tree, which answers until then. Not a goal: throughput of many writers.
"""

import argparse
import math
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.report import Row, quartiles
from tutti_sglang.geometry import Stripe
from tutti_sglang.store.index import RECORD_DTYPE, Index, Records
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.slots import NO_SLOT, slots_of

OWNER = "benchmark"
SEGMENT_SLOTS = 4096
FILL_BATCH = 2048
EVER = 1 << 62
NAMESPACE = Namespace(model="m", weights="w", dtype="bfloat16", page_size=64, tensors=(65536,) * 64, layers=(0, 32))

TARGETS = {
    ("open", 0, "idle"): 0.100,
    ("lookup run", 128, "idle"): 0.0003,
    ("lookup run", 128, "busy"): 0.010,
    ("lookup run", 8192, "idle"): 0.020,
    ("lookup run", 8192, "busy"): 0.050,
    ("publish", 128, "idle"): 0.003,
}
"""Seconds, medians (issue of the store)."""
BYTES_TARGET = 200
AFTER = "lookup after a commit"
OPENINGS = 7

Act = Callable[[], object]


def main() -> None:
    """Fill, measure, print, and write the JSON."""
    options = _options()
    base = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    settings = {"objects": options.objects, "churn": options.churn, "repeat": options.repeat, "seed": options.seed}
    run = report.Report("index", report.machine(base), settings)
    run.head()
    try:
        bench = Bench(base / "index.db", options.seed)
        bench.fill(options.objects, options.churn)
        run.rows += bench.measure(options.repeat)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    run.summary = summarise(run.rows)
    figures(run.summary).show()
    run.write(options.json)


class Bench:
    """One index, as one process sees it."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._random = np.random.default_rng(seed)
        self._index, self._bare = Index(path), Index(path)
        self._space = self._index.namespace_id(NAMESPACE)
        self._keys = np.empty((0, KEY_SIZE), dtype=np.uint8)
        self._slots = np.empty(0, dtype=np.int64)

    def fill(self, objects: int, churn: float) -> None:
        """Publish so many objects; then replace a share of them, so that pages of the B-tree are as full as in
        service."""
        self._grow(objects)
        for _ in range(0, int(objects * churn), FILL_BATCH):
            gone = self._random.choice(len(self._keys), min(FILL_BATCH, objects), replace=False)
            self._index.delete(self._space, self._keys[gone].tobytes(), self._slots[gone])
            self._keys, self._slots = np.delete(self._keys, gone, axis=0), np.delete(self._slots, gone)
            self._grow(objects)

    def measure(self, repeat: int) -> list[Row]:
        """A row per measurement, `repeat` of each, interleaved; and one for the size."""
        self._index.mirror(math.inf)
        rows: list[Row] = [{"what": "size", "keys": 0, "beside": "idle", "round": 0, "bytes_per_object": self._size()}]
        # A commit empties the caches of readers, and after the seconds of a load beside a busy thread what others use
        # is cold: each is told apart.
        for acts, times in (
            (self._reading(), repeat),
            (self._writing(), repeat),
            (self._opening(), min(repeat, OPENINGS)),
        ):
            for turn in range(-1, times):
                for beside, company in (("idle", _idle), ("busy", _busy)):
                    with company():
                        for what, count, prepare in report.rotated(acts, max(0, turn)):
                            if count and what != AFTER:  # what was not used for a second is cold
                                prepare()()
                            line = {"what": what, "keys": count, "beside": beside, "round": turn}
                            rows.append(line | {"seconds": _seconds(prepare())})
        self._index.close()
        self._bare.close()
        return [row for row in rows if row["round"] >= 0]  # the first one warms up

    def _reading(self) -> list[tuple[str, int, Callable[[], Act]]]:
        """What is timed: each is prepared anew before its clock starts."""
        few, many = self._counts()
        return [
            *(("lookup run", count, partial(self._run, count)) for count in (few, many)),
            *(("lookup scattered", count, partial(self._scattered, count)) for count in (few, many)),
            *(("lookup absent", count, partial(self._absent, count)) for count in (few, many)),
            *(("records run", count, partial(self._records, count)) for count in (few, many)),
            *(("lookup run, B-tree", count, partial(self._run, count, bare=True)) for count in (few, many)),
            *(("records run, B-tree", count, partial(self._records, count, bare=True)) for count in (few, many)),
        ]

    def _opening(self) -> list[tuple[str, int, Callable[[], Act]]]:
        return [("open", 0, lambda: self._open), ("load the table", 0, self._load)]

    def _writing(self) -> list[tuple[str, int, Callable[[], Act]]]:
        few, _ = self._counts()
        return [("publish", few, partial(self._new, few)), (AFTER, few, partial(self._run, few))]

    def _counts(self) -> tuple[int, int]:
        return min(128, len(self._keys) // 2), min(8192, len(self._keys) // 2)

    def _load(self) -> Act:
        index = Index(self._path)  # closed when nobody has it any more, which is not timed
        return partial(index.mirror, math.inf)

    def _run(self, count: int, *, bare: bool = False) -> Act:
        start = int(self._random.integers(len(self._keys) - count))
        return partial(self._find, self._keys[start : start + count].tobytes(), True, bare)

    def _scattered(self, count: int) -> Act:
        which = self._random.choice(len(self._keys), count, replace=False)
        return partial(self._find, self._keys[which].tobytes(), True)

    def _absent(self, count: int) -> Act:
        return partial(self._find, secrets.token_bytes(count * KEY_SIZE), False)

    def _records(self, count: int, *, bare: bool = False) -> Act:
        start = int(self._random.integers(len(self._keys) - count))
        return partial(self._get, self._keys[start : start + count].tobytes(), bare)

    def _new(self, count: int) -> Act:
        return partial(self._publish, secrets.token_bytes(count * KEY_SIZE), self._lease(count))

    def _open(self) -> None:
        opened = Index(self._path)
        opened.lookup(self._space, self._keys[0].tobytes())
        opened.close()

    def _find(self, keys: bytes, there: bool, bare: bool = False) -> None:
        index = self._bare if bare else self._index
        assert ((index.locate(self._space, keys) != NO_SLOT) == there).all()

    def _get(self, keys: bytes, bare: bool) -> None:
        index = self._bare if bare else self._index
        assert (index.lookup(self._space, keys).records["slot"] != NO_SLOT).all()

    def _publish(self, keys: bytes, records: Records) -> None:
        assert self._index.publish(OWNER, self._space, keys, records).all()

    def _lease(self, count: int) -> Records:
        granted = slots_of(self._index.lease(OWNER, self._space, count, EVER))
        if len(granted) < count:
            self._index.give_back(OWNER, granted)
            self._index.add_segment(self._space, (0,), 4, SEGMENT_SLOTS, Stripe.TENSOR)
            return self._lease(count)
        self._index.give_back(OWNER, granted[count:])
        records = np.zeros(count, dtype=RECORD_DTYPE)
        records["slot"], records["generation"] = granted[:count], self._random.integers(1 << 63)
        records["root"] = self._random.integers(1 << 63, size=count)
        return records

    def _grow(self, objects: int) -> None:
        while (missing := objects - len(self._keys)) > 0:
            records = self._lease(min(FILL_BATCH, missing))
            keys = secrets.token_bytes(len(records) * KEY_SIZE)
            self._publish(keys, records)
            self._keys = np.concatenate([self._keys, np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_SIZE)])
            self._slots = np.concatenate([self._slots, records["slot"].astype(np.int64)])

    def _size(self) -> float:
        self._index._writer.execute("pragma wal_checkpoint(truncate)")
        return self._path.stat().st_size / len(self._keys)


def _seconds(act: Act) -> float:
    before = time.perf_counter()
    act()
    return time.perf_counter() - before


@contextmanager
def _idle() -> Iterator[None]:
    yield


@contextmanager
def _busy() -> Iterator[None]:
    """Beside a thread that never gives the GIL up by itself."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def summarise(rows: Iterable[Row]) -> list[Row]:
    """Quartiles of the seconds of each measurement, and its target where there is one."""
    times: dict[tuple[str, int, str], list[float]] = {}
    lines: list[Row] = []
    for row in rows:
        if row["what"] == "size":
            lines.append({**row, "target": BYTES_TARGET})
        else:
            times.setdefault((row["what"], row["keys"], row["beside"]), []).append(row["seconds"])
    for (what, keys, beside), seconds in times.items():
        spread = quartiles(seconds)
        target = TARGETS.get((what, keys, beside))
        lines.append({"what": what, "keys": keys, "beside": beside, "seconds": spread, "target": target})
    return lines


def figures(summary: Iterable[Row]) -> report.Figures:
    """A line per measurement."""
    lines = []
    for row in summary:
        name = f"{row['what']} {row['keys'] or ''}".strip() + f", {row['beside']}"
        if row["what"] == "size":
            lines.append(["bytes per object", f"{row['bytes_per_object']:.0f}", f"{row['target']:.0f}"])
        else:
            target = f"{1e3 * row['target']:.1f}" if row["target"] else ""
            lines.append([name, report.Quartiles(*(1e3 * value for value in row["seconds"])).show(), target])
    return report.Figures("Index, ms", ["what", "median (quartiles)", "at most"], lines)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--objects", type=int, default=1_000_000, help="in the index while it is measured")
    parser.add_argument("--churn", type=float, default=0.5, help="share of the objects that is replaced before")
    parser.add_argument("--repeat", type=int, default=31, help="rounds")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="where the index lies")
    return parser.parse_args()


if __name__ == "__main__":
    main()
