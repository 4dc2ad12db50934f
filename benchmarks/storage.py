"""Put and cold get through the HiCache class, against fio, `file`, NIXL POSIX and LMCache, in interleaved rounds.

Goal: what a page costs between SGLang's host pool and the drive, in GB/s, in CPU time, in GIL, and beside a thread that
is busy with Python, as SGLang's scheduler is. Not a goal: latency of requests (chat, long_context).

A contender is written `kind` or `kind:option=value,…`, which makes a sweep out of any option: `tutti:checksum=off`,
`tutti:queue_depth=8,max_io=4MiB`, `fio:iodepth=1`.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report, storage_summary
from benchmarks.pools import shape_of
from benchmarks.worker import BACKENDS, Case, Worker
from tutti_sglang.cli.fio import Fio
from tutti_sglang.units import format_size, parse_size

CONTENDERS = ["fio", "tutti", "tutti:checksum=off", "nixl", "lmcache", "file"]
GIL_ROUNDS = 3


def main() -> None:
    """Measure, print, and write the JSON."""
    options = _options()
    base = Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=options.directory))
    settings = {
        "contenders": options.contender,
        "sizes": [format_size(size) for size in options.sizes],
        "operations": options.operations,
        "bytes": format_size(options.bytes),
        "busy_bytes": format_size(options.busy_bytes),
        "rounds": options.rounds,
        "warm_up": options.warm_up,
        "layout": options.layout,
        "seed": options.seed,
        "sweep": options.sweep,
    }
    run = report.Report("storage", report.machine(base), settings)
    run.head()
    try:
        for size in options.sizes:
            _check_room(base, options.bytes, len(options.contender))
            run.rows += _measure(run, options, size, base / format_size(size))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    run.summary = storage_summary.summarise(run.rows)
    for figures in storage_summary.shown(settings, run.rows):
        figures.show()
    run.write(options.json)
    if options.svg:
        storage_summary.plot(run.summary, options.svg)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--contender", action="append", help=f"one of those that take part (default: {' '.join(CONTENDERS)})"
    )
    parser.add_argument("--sizes", default="64KiB,2MiB,8MiB", help="bytes of a page, one or more of 16KiB … 8MiB")
    parser.add_argument(
        "--operations", default="put,get", help="of put, get (cold), hot, mixed (put and cold get at once)"
    )
    parser.add_argument("--bytes", default="512MiB", help="moved by each contender in each operation")
    parser.add_argument("--busy-bytes", default="", help="the same beside a busy thread, at most (default: --bytes)")
    parser.add_argument("--sweep", action="store_true", help="idle rounds alone, and one table for all cases")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before them that are not kept")
    parser.add_argument(
        "--layout", default="page_first_direct", choices=("page_first_direct", "page_first", "layer_first")
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/tmp"), help="a directory on the drive to be measured"
    )
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="draw a plot per operation there")
    options = parser.parse_args()
    options.contender = options.contender or CONTENDERS
    options.sizes = [parse_size(size) for size in options.sizes.split(",")]
    options.operations = options.operations.split(",")
    options.bytes = parse_size(options.bytes)
    options.busy_bytes = parse_size(options.busy_bytes) if options.busy_bytes else options.bytes
    for contender in options.contender:
        if _parse(contender)[0] not in (*BACKENDS, "fio"):
            parser.error(f"unknown contender {contender!r}; there are {', '.join(('fio', *BACKENDS))}")
    return options


def _parse(contender: str) -> tuple[str, dict[str, str]]:
    """`tutti:max_io=4MiB,queue_depth=8` → kind and options."""
    kind, _, rest = contender.partition(":")
    return kind, dict(part.split("=", 1) for part in rest.split(",") if part)


def _check_room(base: Path, size: int, contenders: int) -> None:
    """Refuse to fill somebody's drive."""
    need = contenders * (3 * size + (1 << 30))
    free = os.statvfs(base).f_bavail * os.statvfs(base).f_frsize
    if free < need:
        raise SystemExit(
            f"{base} has {format_size(free)} free, {format_size(need)} are needed. "
            "Lower --bytes or name another --directory"
        )


def _measure(run: report.Report, options: argparse.Namespace, size: int, base: Path) -> list[report.Row]:
    """All rounds of one page size."""
    rows: list[report.Row] = []
    benches = _open_all(run, options, size, base)
    try:
        for turn in range(-options.warm_up, options.rounds):
            for name in report.rotated(list(benches), turn % max(1, len(benches))):
                for row in _turn(run, options, benches, name, ("idle",) if options.sweep else ("idle", "busy")):
                    if turn >= 0:
                        rows.append({"round": turn, "contender": name, "size": size, **row})
            report.console.print(f"{format_size(size)}: round {turn + 1} of {options.rounds}", highlight=False)
        for turn in range(0 if options.sweep else min(GIL_ROUNDS, options.rounds)):
            for name in list(benches):
                rows += [
                    {"round": turn, "contender": name, "size": size, **row}
                    for row in _turn(run, options, benches, name, ("gil",))
                ]
    finally:
        for bench in benches.values():
            bench.close()
        shutil.rmtree(base, ignore_errors=True)
    return rows


def _open_all(run: report.Report, options: argparse.Namespace, size: int, base: Path) -> dict[str, Fio | Worker]:
    """Every contender that can take part, laid out; why the others cannot is noted."""
    benches: dict[str, Fio | Worker] = {}
    shape = shape_of(size)
    pages = max(1, options.bytes // size)
    busy_pages = max(1, min(pages, options.busy_bytes // size))
    for place, name in enumerate(options.contender):
        kind, extra = _parse(name)
        directory = base / f"{place}-{kind}"
        try:
            if kind == "fio":
                benches[name] = Fio(directory, size, pages, extra)
            else:
                case = Case(kind, extra, directory, shape, pages, busy_pages, options.layout, options.seed)
                benches[name] = Worker(case)
        except RuntimeError as error:
            run.note(f"{name} at {format_size(size)} does not take part", error)
        else:
            run.contenders[name] = benches[name].description
            report.console.print(f"{name}: {run.contenders[name]}", highlight=False, markup=False)
    if not benches:
        raise SystemExit("No contender can take part")
    return benches


def _turn(
    run: report.Report,
    options: argparse.Namespace,
    benches: dict[str, Fio | Worker],
    name: str,
    besides: tuple[str, ...],
) -> Iterator[dict[str, Any]]:
    """What one contender does in one round. One that fails leaves the run."""
    bench = benches[name]
    if isinstance(bench, Fio):
        besides = tuple(beside for beside in besides if beside == "idle")
    try:
        for operation in options.operations:
            for beside in besides:
                yield bench.measure(operation, beside)
    except RuntimeError as error:
        run.note(f"{name} leaves the run", error)
        bench.close()
        del benches[name]


if __name__ == "__main__":
    main()
