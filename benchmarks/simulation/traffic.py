"""Requests over time: who arrives when, with which prefix. Blocks are numbers; equal numbers are equal prefixes."""

import gzip
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 512
"""Tokens of a block."""


TASKS = (8, 8, 10, 11, 13, 14, 14, 14, 15, 18, 21, 22, 33, 36, 40, 46, 48, 61, 62, 122)
"""Blocks of the documents of LEval's tasks, about, on average."""


class Arrival(NamedTuple):
    """A request: seconds since the start, the blocks of its prompt in order, tokens of its reply, whose it is."""

    at: float
    blocks: tuple[int, ...]
    reply: int
    user: int


def chats(rate: float, seconds: float, seed: int = 1, turns: float = 6.0, pause: float = 90.0) -> Iterator[Arrival]:
    """Multi-turn conversations: `rate` requests per second in all; each turn adds a block or two to what was said
    before, below one of 12 system prompts of 2 to 8 blocks."""
    rng = np.random.default_rng(seed)
    fresh = iter(range(1 << 62))
    systems = [tuple(next(fresh) for _ in range(int(rng.integers(2, 9)))) for _ in range(12)]
    due: list[tuple[float, int, tuple[int, ...]]] = []
    start, user = 0.0, 0
    while True:
        if not due or start <= due[0][0]:
            heapq.heappush(due, (start, user, systems[int(rng.integers(12))]))
            start += float(rng.exponential(turns / rate))
            user += 1
            continue
        now, who, history = heapq.heappop(due)
        if now > seconds:
            return
        history = (*history, *(next(fresh) for _ in range(int(rng.integers(1, 3)))))
        yield Arrival(now, history, int(rng.integers(64, 512)), who)
        if rng.random() > 1 / turns:
            heapq.heappush(due, (now + float(rng.exponential(pause)), who, history))


def documents(rate: float, seconds: float, seed: int = 2, each: int = 25) -> Iterator[Arrival]:
    """Questions about long documents, as in LEval: 20 tasks whose documents have 4K to 62K tokens on average, `each`
    documents a task, tasks asked in turn, documents at random; a question ends in a block of its own. Poisson."""
    rng = np.random.default_rng(seed)
    fresh = iter(range(1 << 62))
    texts = [
        [tuple(next(fresh) for _ in range(max(6, int(mean * rng.uniform(0.5, 1.5))))) for _ in range(each)]
        for mean in TASKS
    ]
    now = 0.0
    for number in range(1 << 62):
        now += float(rng.exponential(1 / rate))
        if now > seconds:
            return
        text = texts[number % len(TASKS)][int(rng.integers(each))]
        yield Arrival(now, (*text, next(fresh)), 128, number)


def mooncake(path: Path, speed: float = 1.0) -> Iterator[Arrival]:
    """A trace in the format of Mooncake and Bailian: JSON lines with `timestamp` (ms), `hash_ids` (blocks of 512
    tokens) and `output_length`."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            at = row.get("timestamp", number * 1000.0) / 1e3 / speed
            yield Arrival(at, tuple(row["hash_ids"]), int(row.get("output_length", 128)), row.get("chat_id", number))
