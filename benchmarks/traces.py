"""Request traces for `benchmarks.eviction`: who asks for which prefix, in what order.

The generators and their seeds were fixed before the eviction policy was tuned; what a policy is tuned to must not
change to suit it. Pages are numbers; a request names the pages of its prompt from the first on, and equal numbers are
equal prefixes.
"""

import gzip
import heapq
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

MOONCAKE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl.gz"


class Request(NamedTuple):
    """`pages`: of the prompt, in order; `counted`: whether its hits count (those of a scan do not)."""

    pages: list[int]
    counted: bool = True


Trace = list[Request]


def chat(seed: int = 1, requests: int = 6000) -> Trace:
    """Multi-turn conversations below a few shared system prompts: each turn asks for all pages before it.

    Conversations start at a steady rate, take 6 turns on average (geometric) with a pause of 60 s between them
    (exponential), and grow by 2 to 8 pages a turn. 12 system prompts of 4 to 24 pages, whose popularity falls as 1/n.
    """
    rng = np.random.default_rng(seed)
    fresh = itertools.count()
    systems = [list(itertools.islice(fresh, int(rng.integers(4, 25)))) for _ in range(12)]
    weights = 1 / np.arange(1, 13)
    due: list[tuple[float, int, list[int]]] = []
    started, next_start, trace = 0, 0.0, Trace()
    while len(trace) < requests:
        if not due or next_start < due[0][0]:
            system = systems[rng.choice(12, p=weights / weights.sum())]
            heapq.heappush(due, (next_start, started, list(system)))
            started += 1
            next_start += rng.exponential(1.0)
        now, conversation, history = heapq.heappop(due)
        history = history + list(itertools.islice(fresh, int(rng.integers(2, 9))))
        trace.append(Request(history))
        if rng.random() > 1 / 6:
            heapq.heappush(due, (now + rng.exponential(60.0), conversation, history))
    return trace


def documents(seed: int = 2, requests: int = 2500) -> Trace:
    """Questions of 1 to 3 pages about 200 long documents of 50 to 300 pages, whose popularity falls as 1/n^0.9."""
    rng = np.random.default_rng(seed)
    fresh = itertools.count()
    texts = [list(itertools.islice(fresh, int(rng.integers(50, 301)))) for _ in range(200)]
    weights = np.arange(1, 201) ** -0.9
    chosen = rng.choice(200, size=requests, p=weights / weights.sum())
    return [Request(texts[n] + list(itertools.islice(fresh, int(rng.integers(1, 4))))) for n in chosen]


def with_scan(trace: Trace, seed: int = 3) -> Trace:
    """The same requests, and during their middle half a job that reads prompts of 100 to 300 pages once each: twice as
    many pages as the others ask for in that time. They are never asked for again, and do not count."""
    rng = np.random.default_rng(seed)
    fresh = itertools.count(10**9)
    mixed, debt = Trace(), 0
    for number, request in enumerate(trace):
        mixed.append(request)
        if len(trace) // 4 <= number < 3 * len(trace) // 4:
            debt += 2 * len(request.pages)
            while debt > 0:
                prompt = list(itertools.islice(fresh, int(rng.integers(100, 301))))
                mixed.append(Request(prompt, counted=False))
                debt -= len(prompt)
    return mixed


def mooncake(path: Path = MOONCAKE) -> Trace:
    """Conversations of a real service (data/README.md), blocks of 512 tokens."""
    with gzip.open(path, "rt") as lines:
        return [Request(json.loads(line)["hash_ids"]) for line in lines]


def all_traces(share: float = 1.0) -> Iterator[tuple[str, Trace]]:
    """The traces by name; `share` of the requests of each."""
    chats, texts, real = (trace[: int(len(trace) * share)] for trace in (chat(), documents(), mooncake()))
    yield from (("chat", chats), ("documents", texts), ("mooncake", real))
    yield from ((f"{name} + scan", with_scan(trace)) for name, trace in (("chat", chats), ("documents", texts)))
    yield "mooncake + scan", with_scan(real)
