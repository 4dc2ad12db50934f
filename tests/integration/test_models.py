"""Real servers of every kind of model, shape of ranks and policy: what was computed comes back from the disk, equal.

The cases are in matrix.py; `make matrix`, or `-m matrix`, runs them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.administrator import attach, prompt
from tests.integration.matrix import CASES, FEATURES, PAGE, ROOT, SHAPES, TOKENS, Case, page
from tests.integration.server import Launch, Reply, Server, Servers, hicache
from tests.integration.stores import extra, from_storage

TALES = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. ",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, I sailed. ",
)
WHOLE_PAGES = [32 + place * place * 7 % 95 for place in range(512)]
TAIL = 9
"""Tokens that a prompt has beyond another one."""
PROMPTS: list[str | list[int]] = [*(tale * 6 for tale in TALES), WHOLE_PAGES]


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_computed_comes_back(case: Case, servers: Servers, disk: Path) -> None:
    server = servers.get(case.launch(disk / "store"))
    cold = [server.generate(each) for each in PROMPTS]
    assert all(reply.storage == 0 for reply in cold)
    assert len({reply.tokens for reply in cold}) == len(PROMPTS)
    _ask_again(server, case, PROMPTS)
    if case.write == "write_back":  # stored when it is pushed out
        for number in range(2 * TOKENS // 700):
            server.generate(f"{number} is another number. " * 28, tokens=1)
    server.flush()
    _come_back(server, cold, case)
    server.restart()
    _come_back(server, cold, case)
    servers.close()


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["mla", "window", "hybrid"])
def test_a_model_of_another_kind_takes_the_tier_while_it_serves(name: str, servers: Servers, disk: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    server = servers.get(case.launch())
    server.generate(prompt(1, 200))  # not the beginning of what follows: what is computed before is not stored later
    attach(server, disk / "store", prefetch_timeout_base=100)
    cold = [server.generate(each) for each in PROMPTS]
    assert all(reply.storage == 0 for reply in cold)
    _ask_again(server, case, PROMPTS)
    server.flush()
    _come_back(server, cold, case)
    page = case.page_size
    lengths = (page, page + 1, 4 * page - 1, 4 * page, 4 * page + 1)  # the last token is always computed
    first = [server.generate(prompt(length, length), 8) for length in lengths]
    _ask_again(server, case, [prompt(length, length) for length in lengths])
    server.flush()
    for length, before in zip(lengths, first, strict=True):
        again = server.generate(prompt(length, length), 8)
        assert again.tokens == before.tokens
        assert again.storage == (length - 1) // page * page, length


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_heads_that_two_ranks_stored_are_read_by_one(servers: Servers, disk: Path) -> None:
    flags = ("--page-size", "64", "--hicache-mem-layout", "page_head", "--hicache-io-backend", "kernel")
    flags += ("--hicache-storage-prefetch-policy", "wait_complete")
    launch = Launch(flags=hicache("tutti", *flags, extra=extra(disk / "store", tp_lcm_size=2)), ranks=2)
    server = servers.get(launch)
    first = server.generate(WHOLE_PAGES)
    server.flush()
    from_storage(server.generate(WHOLE_PAGES), first)
    server = servers.get(replace(launch, ranks=1))
    from_storage(server.generate(WHOLE_PAGES), first)
    servers.close()


def _ask_again(server: Server, case: Case, prompts: Sequence[str | list[int]]) -> None:
    """What SGLang needs to see twice: for the selective policy everything, and of a model with a state prompts of whole
    pages. Their last page is computed, and a state before it is kept only once a prompt has branched off there; or only
    once a prompt has ended there."""
    if case.keeps_ends:
        for each in prompts:
            assert server.generate(each).device == 0, "the state at its end is beyond what may be restored"
            server.generate(each[:-TAIL])
            assert server.generate(each).device == len(each) - TAIL
    elif case.write == "write_through_selective" or SHAPES[case.model].state:
        for each in prompts:
            server.generate(each)


def _come_back(server: Server, cold: list[Reply], case: Case) -> None:
    again = [server.generate(each) for each in PROMPTS]
    for first, reply in zip(cold, again, strict=True):
        assert reply.tokens == first.tokens
        assert reply.device == reply.host == 0
        if case.prefetch != "best_effort":  # which takes only what lies ready at the first look
            assert reply.storage > first.prompt_tokens // 2
            assert not case.keeps_ends or reply.storage == first.prompt_tokens - TAIL
    if case.name in ("mla", "window"):  # a prompt of whole pages: the last one is computed, and no more
        assert again[-1].storage == len(WHOLE_PAGES) - case.page_size


def test_the_page_says_what_was_seen() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run `make matrix`"


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len({case[1:] for case in CASES}) == len(CASES)


def test_what_is_said_beside_the_models_names_tests_that_exist() -> None:
    for _, said, test in FEATURES:
        file, _, name = test.partition("::")
        assert said.startswith("untested") != bool(test)
        if test:
            assert f"def {name or 'test_'}" in (ROOT / file).read_text(), test
