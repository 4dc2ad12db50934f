"""A trace through one node or many, and what came of it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.models import Prices, Tier
from benchmarks.simulation.node import Node, Served
from benchmarks.simulation.traffic import Arrival

Route = Callable[[Arrival, list[Node]], int]


class Outcome(NamedTuple):
    """Of all requests: seconds to the first token (mean, median, p99), share of GPU time spent waiting for KV, share of
    prompt tokens by tier, bytes written to and read from each tier, requests and tokens per second, dollars per million
    tokens."""

    requests: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    bubble: float
    hits: dict[str, float]
    written: dict[str, float]
    read: dict[str, float]
    tokens_per_second: float
    dollars_per_million: float


def replay(
    arrivals: Iterable[Arrival], nodes: list[Node], tiers: tuple[Tier, ...], route: Route, prices: Prices
) -> Outcome:
    """Serve all of them in the order of their arrival; `route` names the node."""
    served: list[Served] = []
    end = 0.0
    for request in arrivals:
        node = nodes[route(request, nodes)]
        served.append(node.serve(request))
        end = max(end, node.free_at)
    return _sum_up(served, nodes, tiers, end, prices)


def alone(_: Arrival, __: list[Node]) -> int:
    """The only node."""
    return 0


def randomly(seed: int = 7) -> Route:
    """Any node."""
    rng = np.random.default_rng(seed)
    return lambda _, nodes: int(rng.integers(len(nodes)))


def cache_aware(seed: int = 7, slack: float = 0.1, tries: int = 8) -> Route:
    """As SGLang's router: the node that has most of the prompt, unless its queue is `slack` seconds longer than that of
    the least busy of `tries` nodes drawn at random, which then gets it."""
    rng = np.random.default_rng(seed)
    homes: dict[int, int] = {}

    def route(request: Arrival, nodes: list[Node]) -> int:
        drawn = rng.integers(len(nodes), size=min(tries, len(nodes))).tolist()
        idle = min(drawn, key=lambda index: nodes[index].free_at)
        known = {homes[block] for block in request.blocks[::4] if block in homes}
        best = max(known, key=lambda index: sum(nodes[index].hits(request.blocks)), default=idle)
        late = max(nodes[best].free_at, request.at) - max(nodes[idle].free_at, request.at)
        chosen = best if late <= slack else idle
        for block in request.blocks[::4]:
            homes[block] = chosen
        return chosen

    return route


def _sum_up(served: list[Served], nodes: list[Node], tiers: tuple[Tier, ...], end: float, prices: Prices) -> Outcome:
    ttft = np.array([each.ttft for each in served])
    tokens = sum(each.tokens for each in served)
    names = [tier.name for tier in tiers]
    per_hour = len(nodes) * (prices.gpu + sum(tier.price * tier.capacity / 1e9 for tier in tiers))
    return Outcome(
        len(served),
        float(ttft.mean()),
        float(np.median(ttft)),
        float(np.quantile(ttft, 0.99)),
        sum(each.bubble for each in served) / max(1e-9, len(nodes) * end),
        {name: sum(each.hits[name] for each in served) / tokens for name in names},
        {name: sum(node.written[name] for node in nodes) for name in names},
        {name: sum(node.read[name] for node in nodes) for name in names},
        tokens / end,
        per_hour * end / 3600 / (tokens / 1e6),
    )


def highest_rate(ttft_at: Callable[[float], float], limit: float, low: float, high: float) -> float:
    """The highest request rate whose mean time to the first token stays within `limit` seconds, by bisection."""
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if ttft_at(middle) <= limit else (low, middle)
    return low
