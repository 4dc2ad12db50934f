"""Real servers of every kind of model, shape of ranks and policy: what was computed comes back from the disk, equal.

The cases are in matrix.py; `make matrix`, or `-m matrix`, runs them.
"""

from pathlib import Path

import pytest

from tests.integration.matrix import CASES, PAGE, TOKENS, Case, page
from tests.integration.server import Reply, Server, Servers

TALES = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. ",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, I sailed. ",
)
WHOLE_PAGES = [32 + place * place * 7 % 95 for place in range(512)]
PROMPTS: list[str | list[int]] = [*(tale * 6 for tale in TALES), WHOLE_PAGES]


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_computed_comes_back(case: Case, servers: Servers, disk: Path) -> None:
    server = servers.get(case.launch(disk / "store"))
    cold = [server.generate(prompt) for prompt in PROMPTS]
    assert all(reply.storage == 0 for reply in cold)
    assert len({reply.tokens for reply in cold}) == len(PROMPTS)
    if case.write == "write_through_selective":  # stored when it is asked for again
        for prompt in PROMPTS:
            server.generate(prompt)
    if case.write == "write_back":  # stored when it is pushed out
        for number in range(2 * TOKENS // 700):
            server.generate(f"{number} is another number. " * 28, tokens=1)
    server.flush()
    _come_back(server, cold, case)
    server.restart()
    _come_back(server, cold, case)
    servers.close()


def _come_back(server: Server, cold: list[Reply], case: Case) -> None:
    again = [server.generate(prompt) for prompt in PROMPTS]
    for first, reply in zip(cold, again, strict=True):
        assert reply.tokens == first.tokens
        assert reply.device == reply.host == 0
        if case.prefetch != "best_effort":  # which takes only what lies ready at the first look
            assert reply.storage > first.prompt_tokens // 2


def test_the_page_says_what_was_seen() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run `make matrix`"


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len({case[1:] for case in CASES}) == len(CASES)
