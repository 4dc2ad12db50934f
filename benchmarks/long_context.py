"""Long prompts: computed, asked again, and asked after a flush and after a restart of the server.

Goal: time to first token of a long prompt by the tier that its KV comes from. Not a goal: quality of long contexts.
"""

import argparse

from benchmarks import report, serving
from benchmarks.client import Client, Sample, tokens
from tutti_sglang.units import parse_size


class LongContext:
    """The same prompts in each phase, one after the other: the last page apart, all of them can be hits."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    async def first(self, client: Client, seed: str) -> dict[str, list[Sample]]:
        """Computed, and then found where it was computed."""
        return {"cold": await self._ask(client, seed), "hot": await self._ask(client, seed)}

    async def again(self, client: Client, seed: str, phase: str) -> list[Sample]:
        """The same again."""
        return await self._ask(client, seed)

    async def _ask(self, client: Client, seed: str) -> list[Sample]:
        prompts = (tokens(f"{seed}/{number}", self._options.tokens) for number in range(self._options.prompts))
        return [await client.generate(prompt, self._options.output) for prompt in prompts]


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    serving.add_options(parser)
    parser.add_argument("--tokens", type=parse_size, default="8K", help="of a prompt; K is 1024")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--output", type=int, default=16, help="tokens of each reply")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("tokens", "prompts", "output")}
    serving.main("long_context", options, LongContext(options), settings)


if __name__ == "__main__":
    main()
