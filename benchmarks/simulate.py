"""A simulator: traces over models of GPU, DRAM, drives and policies, and what they would cost.

Goal: what to expect before buying, and a check of the models against the Tutti paper. Not a goal: a substitute for a
measurement; every figure it prints is a prediction.

    python -m benchmarks.simulate paper             predictions of the paper's figures, beside the figures
    python -m benchmarks.simulate node  [--trace F] one node: no cache, DRAM, a slow drive, a fast one, policies
    python -m benchmarks.simulate fleet [--nodes N] many nodes: random and cache-aware routing, and a peer tier
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.simulation.models import LLAMA_8B, Gpu, Prices, Tier
from benchmarks.simulation.node import Node, Policy, room
from benchmarks.simulation.paper import calibrate, predictions
from benchmarks.simulation.replay import Outcome, Route, alone, cache_aware, randomly, replay
from benchmarks.simulation.traffic import Arrival, chats, documents, mooncake

GB = 1e9
HBM = Tier("HBM", float("inf"), float("inf"), 40 * GB)
DRAM = Tier("DRAM", 50 * GB, 50 * GB, 256 * GB, layerwise=True, price=Prices().dram)
DRIVE = Tier("drive", 6 * GB, 4 * GB, 4000 * GB, layerwise=True, price=Prices().ssd)
MIXED = DRIVE._replace(name="drive without windows", windows=False, mixing=0.5)
SLOW = Tier("slow drive", 0.5 * GB, 0.4 * GB, 4000 * GB, price=Prices().ssd)
PEERS = Tier("peers", 5 * GB, float("inf"), 64 * GB, layerwise=True, setup=0.002, price=Prices().dram)
"""The memory that each node lends to a fleet, over a network of 50 Gb/s; everything new is offered."""
FLOPS = 400e12
"""What a GPU of the H100's kind sustains in prefill."""

Rows = list[tuple[str, Outcome]]


def main() -> None:
    """Print a table; `--json FILE` keeps it."""
    options = _options()
    match options.what:
        case "paper":
            data = _paper()
        case "node":
            data = _table(_node(options))
        case _:
            data = _table(_fleet(options))
    if options.json:
        options.json.write_text(json.dumps({"what": options.what, "seed": options.seed, "rows": data}, indent=1) + "\n")


def _paper() -> list[dict[str, Any]]:
    found = calibrate()
    print("calibrated on raw bandwidths and Fig. 2 alone:")
    print(f"  16K tokens after 48K take {found.gpu.prefill(16 << 10, 48 << 10):.2f} s; ", end="")
    print(", ".join(f"{name} {tier.read / GB:.1f} GB/s" for name, tier in found.tiers.items() if name != "HBM"))
    print(f"{'':46}{'predicted':>10}{'paper':>10}{'error':>9}")
    rows = predictions()
    for row in rows:
        print(f"{row.what:46}{row.predicted:>10.3f}{row.paper:>10.3f}{row.error:>+9.0%}")
    return [row._asdict() | {"error": row.error} for row in rows]


def _node(options: argparse.Namespace) -> Rows:
    gpu = Gpu.from_flops(LLAMA_8B, FLOPS)
    contenders: list[tuple[str, tuple[Tier, ...], Policy]] = [
        ("GPU memory alone", (HBM,), Policy()),
        ("and DRAM", (HBM, DRAM), Policy()),
        ("and DRAM, drive", (HBM, DRAM, DRIVE), Policy()),
        ("and drive", (HBM, DRIVE), Policy()),
        ("and drive, preload", (HBM, DRIVE), Policy(preload=True)),
        ("and drive, no windows", (HBM, MIXED), Policy()),
        ("and slow drive", (HBM, SLOW), Policy()),
        ("and slow drive, break-even", (HBM, SLOW), Policy(break_even=True)),
    ]
    return [
        (name, replay(_arrivals(options), [Node(LLAMA_8B, gpu, tiers, policy)], tiers, alone, Prices()))
        for name, tiers, policy in contenders
    ]


def _fleet(options: argparse.Namespace) -> Rows:
    gpu, rows = Gpu.from_flops(LLAMA_8B, FLOPS), Rows()
    for count in options.nodes:
        ways: list[tuple[str, tuple[Tier, ...], Route]] = [
            ("random", (HBM, DRIVE), randomly(options.seed)),
            ("cache-aware", (HBM, DRIVE), cache_aware(options.seed)),
            ("cache-aware, peers", (HBM, DRIVE, PEERS), cache_aware(options.seed)),
        ]
        for name, tiers, route in ways:
            peers = room(LLAMA_8B, PEERS, count) if PEERS in tiers else None
            nodes = [Node(LLAMA_8B, gpu, tiers, Policy(preload=True), peers) for _ in range(count)]
            rows.append((f"{count} nodes, {name}", replay(_arrivals(options, count), nodes, tiers, route, Prices())))
    return rows


def _arrivals(options: argparse.Namespace, nodes: int = 1) -> Iterable[Arrival]:
    if options.trace:
        return mooncake(options.trace, options.speed)
    kind = {"chat": chats, "documents": documents}[options.traffic]
    return kind(options.rate * nodes, options.seconds, options.seed)


def _table(rows: Rows) -> list[dict[str, Any]]:
    print(f"{'':28}{'requests':>9}{'TTFT p50':>10}{'p99':>9}{'bubble':>8}{'hits':>7}", end="")
    print(f"{'read':>10}{'written':>10}{'network':>10}{'$/M tokens':>12}")
    for name, row in rows:
        read, written = (
            sum(nbytes for tier, nbytes in way.items() if "drive" in tier) for way in (row.read, row.written)
        )
        network = row.read.get(PEERS.name, 0.0) + row.written.get(PEERS.name, 0.0)
        print(
            f"{name:28}{row.requests:>9}{row.ttft_p50:>9.3f}s{row.ttft_p99:>8.2f}s{row.bubble:>8.1%}"
            f"{sum(row.hits.values()):>7.1%}{read / 1e12:>8.2f}TB{written / 1e12:>8.2f}TB{network / 1e12:>8.2f}TB"
            f"{row.dollars_per_million:>12.3f}"
        )
    return [{"name": name, **row._asdict()} for name, row in rows]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("paper", "node", "fleet"))
    parser.add_argument("--traffic", choices=("chat", "documents"), default="chat")
    parser.add_argument("--trace", type=Path, help="JSON lines of Mooncake or Bailian (.jsonl, .jsonl.gz)")
    parser.add_argument("--speed", type=float, default=1.0, help="replay the trace so much faster")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second, per node")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of traffic; a day has 86400")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
