"""Chats of several turns by several clients at once, taken up again after a flush and after a restart of the server.

Goal: time to first token of a chat that goes on after SGLang's own caches are gone, and the tier its history came from.
Not a goal: throughput at saturation (sglang.bench_serving measures that).
"""

import argparse

from benchmarks import report, serving
from benchmarks.client import Client, Sample, together, tokens


class Chat:
    """Clients share a system prompt; each turn appends the reply and what the user says next."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._histories: list[list[int]] = []

    async def first(self, client: Client, seed: str) -> dict[str, list[Sample]]:
        """All turns; the first one and the later ones apart."""
        system = tokens(f"{seed}/system", self._options.system)
        self._histories = [list(system) for _ in range(self._options.clients)]
        samples = await together(self._talk(client, seed, number) for number in range(self._options.clients))
        turns = self._options.turns
        opening = samples[::turns]
        later = [sample for i, sample in enumerate(samples) if i % turns]
        return {"turn 1": opening} | ({"later turns": later} if later else {})

    async def again(self, client: Client, seed: str, phase: str) -> dict[str, list[Sample]]:
        """One more turn of every chat, all at once."""
        samples = await together(self._go_on(client, seed, number, phase) for number in range(self._options.clients))
        return {phase: samples}

    async def _talk(self, client: Client, seed: str, number: int) -> list[Sample]:
        samples = []
        for turn in range(self._options.turns):
            samples += await self._go_on(client, seed, number, str(turn))
        return samples

    async def _go_on(self, client: Client, seed: str, number: int, turn: str) -> list[Sample]:
        history = self._histories[number]
        history += tokens(f"{seed}/{number}/{turn}", self._options.turn_tokens)
        sample = await client.generate(history, self._options.output)
        history += sample.reply
        return [sample]


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__)
    serving.add_options(parser)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system", type=int, default=512, help="tokens of the system prompt that all share")
    parser.add_argument("--turn-tokens", type=int, default=256, help="tokens that the user adds in each turn")
    parser.add_argument("--output", type=int, default=32, help="tokens of each reply")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("clients", "turns", "system", "turn_tokens", "output")}
    serving.main("chat", options, Chat(options), settings)


if __name__ == "__main__":
    main()
