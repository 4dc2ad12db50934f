"""The simulator: what it must conserve, what is known in closed form, and that the page shows what it prints."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.models import LLAMA_8B, Gpu, Prices, Tier
from benchmarks.simulation.node import LOAD, Node, Policy, room
from benchmarks.simulation.paper import BUBBLE, RECOMPUTE, calibrate, first_token, predictions
from benchmarks.simulation.replay import alone, cache_aware, highest_rate, randomly, replay
from benchmarks.simulation.traffic import BLOCK, Arrival, chats, documents, mooncake
from benchmarks.traces import MOONCAKE

GB = 1e9
GPU = Gpu.from_flops(LLAMA_8B, 400e12)
HBM = Tier("HBM", float("inf"), float("inf"), 20 * GB)
DRIVE = Tier("drive", 6 * GB, 4 * GB, 1000 * GB, layerwise=True)
SLOW = Tier("slow", 0.1 * GB, 0.1 * GB, 1000 * GB)


def node(*tiers: Tier, policy: Policy = LOAD) -> Node:
    return Node(LLAMA_8B, GPU, tiers, policy)


def ask(*blocks: int, at: float = 0.0) -> Arrival:
    return Arrival(at, blocks, 0, 0)


def test_one_request_takes_what_arithmetic_says() -> None:
    made = node(Tier("drive", 6 * GB, 4 * GB, 1000 * GB))
    first = made.serve(ask(1, 2, 3))
    assert first.ttft == pytest.approx(GPU.prefill(3 * BLOCK, 0))
    again = made.serve(ask(1, 2, 3, 4, at=100.0))
    load = 3 * BLOCK * LLAMA_8B.kv_bytes / (6 * GB)
    assert again.ttft == pytest.approx(GPU.prefill(BLOCK, 3 * BLOCK) + load)
    assert again.bubble == pytest.approx(load)
    assert again.hits == {"drive": 3 * BLOCK}


def test_a_layerwise_load_hides_behind_compute() -> None:
    made = node(DRIVE)
    made.serve(ask(1, 2))
    found = made.serve(ask(1, 2, *range(10, 40), at=100.0))
    load = 2 * BLOCK * LLAMA_8B.kv_bytes / DRIVE.read
    assert found.bubble == pytest.approx(load / LLAMA_8B.layers)


def test_the_last_token_is_always_computed() -> None:
    made = node(HBM)
    made.serve(ask(1, 2))
    assert made.serve(ask(1, 2, at=50.0)).hits == {"HBM": BLOCK}


def test_preload_uses_the_time_in_the_queue() -> None:
    ttft = {}
    for preload in (False, True):
        made = node(Tier("drive", 1 * GB, 1 * GB, 1000 * GB), policy=Policy(preload=preload))
        made.serve(ask(*range(100)))
        made.serve(ask(*range(1000, 1400), at=100.0))  # keeps the GPU busy while the next one waits
        ttft[preload] = made.serve(ask(*range(101), at=100.001)).ttft
    assert ttft[True] < ttft[False]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([DRIVE, SLOW]))
def test_break_even_is_never_slower_than_recomputing_or_loading(seed: int, tier: Tier) -> None:
    def mean(tiers: tuple[Tier, ...], policy: Policy) -> float:
        arrivals = documents(0.01, 4000, seed, each=1)  # far apart: no queue in which one choice delays another
        return replay(arrivals, [Node(LLAMA_8B, GPU, tiers, policy)], tiers, alone, Prices()).ttft_mean

    chosen = mean((tier,), Policy(break_even=True))
    assert chosen <= mean((tier,), Policy()) + 1e-9
    assert chosen <= mean((Tier("none", 1.0, 1.0, 0.0),), Policy()) + 1e-9


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4))
def test_tokens_and_bytes_add_up(seed: int, count: int) -> None:
    tiers = (HBM, DRIVE)
    nodes = [Node(LLAMA_8B, GPU, tiers) for _ in range(count)]
    arrivals = list(chats(2.0, 60, seed))
    found = replay(arrivals, nodes, tiers, randomly(seed), Prices())
    tokens = sum(len(each.blocks) for each in arrivals) * BLOCK
    assert found.requests == len(arrivals)
    assert 0 <= sum(found.hits.values()) < 1
    assert found.read["drive"] == pytest.approx(found.hits["drive"] * tokens * LLAMA_8B.kv_bytes)
    assert found.written["drive"] <= tokens * LLAMA_8B.kv_bytes


def test_the_same_seed_is_the_same_traffic() -> None:
    assert list(chats(3.0, 100, 5)) == list(chats(3.0, 100, 5))
    assert list(documents(1.0, 100, 5)) == list(documents(1.0, 100, 5))
    assert list(chats(3.0, 100, 5)) != list(chats(3.0, 100, 6))


def test_routing_by_cache_hits_more_and_peers_more_still() -> None:
    hits = []
    peers = Tier("peers", 5 * GB, float("inf"), 0.0, layerwise=True)
    for tiers, route in (
        ((HBM, DRIVE), randomly()),
        ((HBM, DRIVE), cache_aware()),
        ((HBM, DRIVE, peers), cache_aware()),
    ):
        shared = room(LLAMA_8B, DRIVE, 6) if peers in tiers else None
        nodes = [Node(LLAMA_8B, GPU, tiers, Policy(preload=True), shared) for _ in range(6)]
        hits.append(sum(replay(chats(12.0, 200), nodes, tiers, route, Prices()).hits.values()))
    assert hits == sorted(hits)
    assert hits[0] < hits[2]


def test_a_public_trace_replays() -> None:
    found = replay(mooncake(MOONCAKE), [node(HBM, DRIVE)], (HBM, DRIVE), alone, Prices())
    assert found.requests > 100
    assert sum(found.hits.values()) > 0


def test_the_calibration_reproduces_what_it_was_made_of() -> None:
    found = calibrate()
    total, prefix = 64 << 10, 48 << 10
    compute = found.gpu.prefill(total - prefix, prefix)
    for name in ("SSD", "GDS"):
        assert 1 - compute / first_token(found, name, total, prefix) == pytest.approx(BUBBLE[name])
    assert found.gpu.prefill(total, 0) == pytest.approx(RECOMPUTE * first_token(found, "SSD", total, prefix))


def test_the_page_shows_the_predictions() -> None:
    page = (Path(__file__).parent.parent / "docs" / "simulation.md").read_text()
    shown = {cells[0]: (float(cells[1]), float(cells[2])) for cells in _rows(page)}
    for row in predictions():
        assert shown[row.what] == (pytest.approx(row.predicted, abs=6e-4), row.paper), row


def _rows(page: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines()]
    return [cells for cells in lines if len(cells) == 4 and re.fullmatch(r"[\d.]+", cells[1])]


def test_bisection_finds_the_limit() -> None:
    assert highest_rate(lambda rate: rate * rate, 4.0, 0.0, 10.0) == pytest.approx(2.0, abs=0.01)


def test_what_is_fetched_or_published_is_what_the_drives_keep() -> None:
    """Each block on a drive was computed there, and offered, or came over the network."""
    peers = Tier("peers", 5 * GB, float("inf"), 1000 * GB, layerwise=True)
    tiers = (HBM, DRIVE, peers)
    shared = room(LLAMA_8B, peers, 4)
    nodes = [Node(LLAMA_8B, GPU, tiers, Policy(preload=True), shared) for _ in range(4)]
    found = replay(chats(8.0, 120), nodes, tiers, randomly(3), Prices())
    assert found.read["peers"] > 0
    assert found.read["peers"] + found.written["peers"] == pytest.approx(found.written["drive"], rel=0.05)
