"""Long prompts: computed, asked again, and asked after a flush and after a restart of the server.

Goal: time to first token of a long prompt by the tier that its KV comes from. Not a goal: quality of long contexts.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report, serving
from benchmarks.client import Client, Sample, tokens
from tutti_sglang.units import parse_size

FIELDS = ("context", "input", "text", "document")
"""Where data sets keep their long text."""


class LongContext:
    """The same prompts in each phase, one after the other: the last page apart, all of them can be hits, or the share
    `reuse` of each when they come again."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._texts = documents(options.data, options.prompts) if options.data else []

    async def first(self, client: Client, seed: str) -> dict[str, list[Sample]]:
        """Computed, and then found where it was computed."""
        return {"cold": await self._ask(client, seed), "hot": await self._ask(client, seed)}

    async def again(self, client: Client, seed: str, phase: str) -> dict[str, list[Sample]]:
        """The same again, as far as it is to be the same."""
        return {phase: await self._ask(client, seed, f"{phase}/other")}

    async def _ask(self, client: Client, seed: str, other: str = "") -> list[Sample]:
        prompts = (self._prompt(f"{seed}/{number}", number, other) for number in range(self._options.prompts))
        return [await client.generate(prompt, self._options.output) for prompt in prompts]

    def _prompt(self, seed: str, number: int, other: str) -> list[int] | str:
        reuse = self._options.reuse if other else 1.0
        if self._texts:
            text = self._texts[number % len(self._texts)]
            return text[: int(len(text) * reuse)] + f" {other}"
        count = self._options.tokens
        kept = int(count * reuse)
        return tokens(seed, count)[:kept] + tokens(f"{seed}/{other}", count - kept)


def documents(path: Path, most: int) -> list[str]:
    """Long texts of a data set in JSON lines, as LooGLE and LEval have them. ValueError where no line has any."""
    found = []
    for line in path.read_text().splitlines():
        row = msgspec.json.decode(line, type=dict[str, Any]) if line.strip() else {}
        texts = [row[field] for field in FIELDS if isinstance(row.get(field), str)]
        found += texts[:1]
        if len(found) == most:
            break
    if not found:
        raise ValueError(f"{path} has no line with a text in any of {', '.join(FIELDS)}")
    return found


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    serving.add_options(parser)
    parser.add_argument("--tokens", type=parse_size, default="8K", help="of a prompt, 4K to 640K; K is 1024")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--reuse", type=float, default=1.0, help="share of a prompt that comes again after the flush")
    parser.add_argument("--data", type=Path, metavar="FILE", help="LooGLE or LEval as JSON lines, instead of tokens")
    parser.add_argument("--output", type=int, default=16, help="tokens of each reply")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("tokens", "prompts", "reuse", "output")}
    settings |= {"data": options.data.name} if options.data else {}
    serving.main("long_context", options, LongContext(options), settings)


if __name__ == "__main__":
    main()
