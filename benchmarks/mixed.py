"""Everything at once: long documents that come back, chats that go on, and short prompts that nobody asks twice.

Goal: what the short prompts pay for the I/O of the long ones, and what the long ones gain. Requests arrive at random,
at a steady rate, whatever the server makes of the earlier ones.
"""

import argparse
import asyncio
import random
from typing import NamedTuple

from benchmarks import report, serving
from benchmarks.client import Client, Sample, tokens
from tutti_sglang.units import parse_size

KINDS = ("long", "chat", "short")


class Request(NamedTuple):
    """One of KINDS, and its prompt, that arrives `after` seconds."""

    kind: str
    prompt: list[int]
    after: float


class Mixed:
    """The same documents and chats in each phase; short prompts are always new."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    async def first(self, client: Client, seed: str) -> dict[str, list[Sample]]:
        """Seen for the first time, and once more."""
        return await self._load(client, seed, "cold") | await self._load(client, seed, "hot")

    async def again(self, client: Client, seed: str, phase: str) -> dict[str, list[Sample]]:
        """The same mix."""
        return await self._load(client, seed, phase)

    async def _load(self, client: Client, seed: str, phase: str) -> dict[str, list[Sample]]:
        async def one(request: Request) -> tuple[str, Sample]:
            await asyncio.sleep(request.after)
            return request.kind, await client.generate(request.prompt, self._options.output)

        served = await asyncio.gather(*(one(request) for request in self.requests(seed, phase)))
        found = {f"{phase}, {kind}": [sample for each, sample in served if each == kind] for kind in KINDS}
        return {name: samples for name, samples in found.items() if samples}

    def requests(self, seed: str, phase: str) -> list[Request]:
        """Of one phase, in the order of their arrival."""
        options, draw = self._options, random.Random(f"{seed}/{phase}")
        after, requests = 0.0, []
        for number in range(options.requests):
            after += draw.expovariate(options.rate)
            kind = KINDS[number % len(KINDS)]
            which = number // len(KINDS) % options.documents
            prompt = {
                "long": lambda which=which: tokens(f"{seed}/long/{which}", options.tokens),
                "chat": lambda which=which: (
                    tokens(f"{seed}/chat/{which}", options.tokens // 4) + tokens(f"{seed}/{phase}/{which}", 64)
                ),
                "short": lambda number=number: tokens(f"{seed}/{phase}/short/{number}", 128),
            }[kind]()
            requests.append(Request(kind, prompt, after))
        return requests


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    serving.add_options(parser)
    parser.add_argument("--requests", type=int, default=24, help="in each phase, of all kinds")
    parser.add_argument("--documents", type=int, default=4, help="different long ones, and chats")
    parser.add_argument("--tokens", type=parse_size, default="4K", help="of a long prompt; K is 1024")
    parser.add_argument("--rate", type=float, default=2.0, help="requests in a second")
    parser.add_argument("--output", type=int, default=16, help="tokens of each reply")
    options = parser.parse_args()
    names = ("requests", "documents", "tokens", "rate", "output")
    settings = {name: getattr(options, name) for name in names}
    serving.main("mixed", options, Mixed(options), settings)


if __name__ == "__main__":
    main()
