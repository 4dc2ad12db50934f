"""What gio_uring costs per I/O: the kernel on a GPU, or its CPU twin, against the software controller.

Goal: I/Os per second, microseconds per I/O and GB/s by size and number of SMs, so that launches and protocol can be
compared between machines. Not a goal: the speed of a drive; the files are in the page cache, and the controller's
threads copy.

Needs no more than the source tree, numpy, a C++ compiler and, for `--mover gpu`, cuda-python and libcu++.
"""

import argparse
import ctypes
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import Service
from tutti_sglang.gio.queues import HostMemory
from tutti_sglang.gio.twin import Bell, Pace, Twin
from tutti_sglang.kernels import gio_native
from tutti_sglang.testing.gio_rig import SEGMENTS, GioRig, Shape
from tutti_sglang.units import format_size, parse_size

WORKERS = 4  # of the controller


def main() -> None:
    """Measure and print; `--json FILE` keeps the rows."""
    options = _options()
    if options.mover == "gpu" and (reason := _why_no_gpu()):
        sys.exit(f"no figures: {reason}; --mover twin measures the same protocol on the CPU")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tutti-gio-", dir=options.directory) as folder:
        native = gio_native.current(Path(folder))
        for size in options.sizes:
            shape = Shape(
                depth=8,
                pairs=options.pairs,
                log_entries=7,
                mdts=max(size, 4096),
                segment=options.bytes // SEGMENTS,
                memory=options.bytes,
            )
            with _mover(options.mover, Path(folder), native, shape) as (rig, name, granted):
                print(f"{name}; controller with {WORKERS} threads on {platform.processor() or platform.machine()}")
                for sms in options.sms if options.mover == "gpu" else [0]:
                    rows.append(_measure(rig, size, options.seconds, sms) | {"sms": granted(sms), "device": name})
                    _print(rows[-1])
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1))
    if options.profiles:
        from tutti_sglang.schedule.profiling import save_sms  # needs more than the rest does

        largest = [row for row in rows if row["size"] == max(options.sizes) and row["sms"]]
        save_sms(options.profiles, [(row["sms"], row["gb_per_second"] * 1e9) for row in largest])


def _why_no_gpu() -> str:
    try:
        from cuda.core import Device

        Device().set_current()
    except Exception as error:  # noqa: BLE001  (cuda.core raises what it pleases without a driver)
        return f"no CUDA device ({str(error).splitlines()[0]})"
    return ""


def _measure(rig: GioRig, size: int, seconds: float, sms: int) -> dict[str, Any]:
    """Whole batches of reads at random places, each checked, for about `seconds`; and single reads."""
    rng = np.random.default_rng(size)
    places = SEGMENTS * rig.shape.segment // size
    count = min(abi.CONTEXTS, places)
    batch = rig.batch(rng.permutation(places)[:count] * size, size)
    assert (rig.run(batch, sms=sms) == size).all()
    assert (rig.in_memory(batch, count - 1) == rig.expected(batch, count - 1)).all()
    times, until = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        began = time.perf_counter()
        results = rig.run(batch, sms=sms)
        times.append(time.perf_counter() - began)
        assert (results == size).all()
    single = []
    for _ in range(50):
        began = time.perf_counter()
        rig.run(batch[:1], sms=sms)
        single.append(time.perf_counter() - began)
    took = float(np.median(times))
    return {
        "size": size,
        "ios": count,
        "rounds": len(times),
        "ios_per_second": count / took,
        "us_per_io": took / count * 1e6,
        "gb_per_second": count * size / took / 1e9,
        "single_us": float(np.median(single)) * 1e6,
    }


def _print(row: dict[str, Any]) -> None:
    print(
        f"{format_size(row['size']):>8} x {row['ios']:<5} {row['sms']:>4} SMs {row['ios_per_second']:>12,.0f} I/O/s "
        f"{row['us_per_io']:>8.2f} µs/I/O {row['gb_per_second']:>7.2f} GB/s   one alone {row['single_us']:.0f} µs"
    )


@contextmanager
def _mover(kind: str, folder: Path, native: ctypes.CDLL, shape: Shape) -> Iterator[tuple[GioRig, str, Any]]:
    """A rig with its mover: (rig, the mover's name, SMs asked for → SMs in use)."""
    if kind == "gpu":
        from cuda.core import Device

        from tutti_sglang.gio.gpu import CudaMemory, GpuMover

        device = Device()
        memory = CudaMemory(device)
        rig = GioRig(folder, native, memory, shape, Service(WORKERS, 0.01, 0.001))
        mover = GpuMover(rig.ring, device, lambda: rig.controller.wake())
        yield rig, device.name, lambda sms: mover.stream(sms)[1]
        mover.sync()
        rig.close()
        mover.close()
        memory.close()
        return
    rig, bell = GioRig(folder, native, HostMemory(), shape, Service(WORKERS)), Bell(native)
    twin = Twin(native, rig.ring, [rig.controller], bell, Pace(window=64))
    yield rig, "CPU twin, 1 thread", lambda sms: 0
    rig.close()
    twin.close(60)
    bell.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--mover", choices=["gpu", "twin"], default="gpu")
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[4096, 64 << 10, 1 << 20])
    parser.add_argument("--sms", nargs="+", type=int, default=[8, 16, 0], help="0: the whole GPU")
    parser.add_argument("--pairs", type=int, default=16, help="queue pairs")
    parser.add_argument("--bytes", type=parse_size, default=64 << 20, help="of the files, and of memory")
    parser.add_argument("--seconds", type=float, default=1.0, help="per line")
    parser.add_argument("--directory", type=Path, help="where the files lie")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--profiles", type=Path, help="`profiles` beside a store's index: plans of layers go by it then"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
