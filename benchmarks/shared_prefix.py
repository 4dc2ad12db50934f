"""Many short questions behind a few long prefixes: system prompts with tools, documents that many people ask about.

Goal: time to first token by the tier that a shared prefix comes from, with several requests at once.
"""

import argparse

from benchmarks import report, serving
from benchmarks.client import Client, Sample, at_most, tokens
from tutti_sglang.units import parse_size


class SharedPrefix:
    """Groups of questions; those of one group share a prefix, and no two groups share anything."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    async def first(self, client: Client, seed: str) -> dict[str, list[Sample]]:
        """The first question of each group computes its prefix; the others find it."""
        opening = await self._ask(client, seed, range(1))
        return {"first of a group": opening, "the others": await self._ask(client, seed, range(1, self._options.each))}

    async def again(self, client: Client, seed: str, phase: str) -> dict[str, list[Sample]]:
        """One more question of each group."""
        return {phase: await self._ask(client, f"{seed}/{phase}", range(1), prefix=seed)}

    async def _ask(self, client: Client, seed: str, numbers: range, prefix: str = "") -> list[Sample]:
        options = self._options
        heads = [tokens(f"{prefix or seed}/{group}", options.tokens) for group in range(options.groups)]
        prompts = [
            head + tokens(f"{seed}/{group}/{number}", options.question)
            for number in numbers
            for group, head in enumerate(heads)
        ]
        return await at_most(options.parallel, (client.generate(prompt, options.output) for prompt in prompts))


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    serving.add_options(parser)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--each", type=int, default=8, help="questions of a group")
    parser.add_argument("--tokens", type=parse_size, default="2K", help="of a prefix; K is 1024")
    parser.add_argument("--question", type=int, default=64, help="tokens of a question")
    parser.add_argument("--parallel", type=int, default=4, help="requests at once")
    parser.add_argument("--output", type=int, default=16, help="tokens of each reply")
    options = parser.parse_args()
    names = ("groups", "each", "tokens", "question", "parallel", "output")
    settings = {name: getattr(options, name) for name in names}
    serving.main("shared_prefix", options, SharedPrefix(options), settings)


if __name__ == "__main__":
    main()
