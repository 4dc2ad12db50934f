"""Triton gather and scatter with checksums, as a share of a plain copy of the same bytes on the same device.

Goal: the price of paging and checksums for the direct path's mover, device to device and through pinned host memory.
Not a goal: drives. Needs the source tree, torch, Triton and a CUDA device.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tutti_sglang.kernels.pack import TritonPack, nhd

PAGE_SIZE = 64
ROUNDS = 9


def main() -> None:
    """Measure and print; `--json FILE` keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no figures: no CUDA device")
    rows = [
        _measure(options.pages, heads, side) for heads in options.heads for side in ("device memory", "pinned memory")
    ]
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1))


def _measure(pages: int, heads: int, side: str) -> dict[str, Any]:
    """One layer, K and V, of `pages` random pages; rounds of copy, gather and scatter, interleaved."""
    pools = [torch.randint(0, 255, (2 * pages * PAGE_SIZE, heads, 256), dtype=torch.uint8, device="cuda") for _ in "kv"]
    size = PAGE_SIZE * heads * 256
    where = {"device": "cuda"} if side == "device memory" else {"pin_memory": True}
    dense = torch.empty((pages, 2 * size), dtype=torch.uint8, **where)
    flat = torch.cat([pool.flatten()[: pages * size] for pool in pools]).view(pages, 2 * size)
    starts = dense.data_ptr() + torch.arange(pages)[:, None] * 2 * size + torch.tensor([0, size])
    chosen, places = torch.randperm(2 * pages, device="cuda")[:pages], starts.cuda()
    pack = TritonPack([nhd(pool, PAGE_SIZE) for pool in pools], "cuda")
    ways: dict[str, Callable[[], Any]] = {
        "copy out": lambda: dense.copy_(flat, non_blocking=True),
        "gather": lambda: pack.gather(chosen, places),
        "copy in": lambda: flat.copy_(dense, non_blocking=True),
        "scatter": lambda: pack.scatter(chosen, places),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 2):
        for name, act in ways.items():
            took = _seconds(act)
            if number >= 2:
                times[name].append(took)
    speed = {name: 2 * pages * size / statistics.median(each) / 1e9 for name, each in times.items()}
    row = {
        "device": torch.cuda.get_device_name(),
        "dense": side,
        "heads": heads,
        "pages": pages,
        "gb_per_second": speed,
    }
    row |= {"gather_share": speed["gather"] / speed["copy out"], "scatter_share": speed["scatter"] / speed["copy in"]}
    print(
        f"{row['device']}, dense side in {side}, {pages} pages of {heads} heads: gather {speed['gather']:.0f} GB/s "
        f"({row['gather_share']:.0%} of a copy), scatter {speed['scatter']:.0f} GB/s ({row['scatter_share']:.0%})"
    )
    return row


def _seconds(act: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    act()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    main()
