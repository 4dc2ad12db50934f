"""Parsers of what others may have written: the corpus of the long runs again, and some thousand new inputs."""

from itertools import islice

import pytest

from tests.fuzz.__main__ import corpus, outcome
from tests.fuzz.mutate import inputs
from tests.fuzz.parsers import PARSERS

INPUTS = 1500


@pytest.mark.parametrize("name", PARSERS)
def test_every_input_is_answered_or_refused_by_name(name: str) -> None:
    parser = PARSERS[name]
    assert all(outcome(parser, seed) == "good" for seed in parser.seeds)
    seen = {outcome(parser, data) for data in [*corpus(name), *islice(inputs(parser.seeds, 7), INPUTS)]}
    assert len(seen) > 1 or not parser.refuses, "no input was refused: the mutations do not reach the parser"


@pytest.mark.parametrize("name", PARSERS)
def test_the_corpus_is_kept(name: str) -> None:
    assert corpus(name)
