"""Parsers of what others may have written: the corpus of the long runs again, and some thousand new inputs."""

import re
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from tests.fuzz.__main__ import corpus, outcome
from tests.fuzz.mutate import inputs
from tests.fuzz.parsers import PARSERS

INPUTS = 1500
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PARSERS)
def test_every_input_is_answered_or_refused_by_name(name: str) -> None:
    parser = PARSERS[name]
    assert all(outcome(parser, seed) == "good" for seed in parser.seeds)
    seen = {outcome(parser, data) for data in [*corpus(name), *islice(inputs(parser.seeds, 7), INPUTS)]}
    assert len(seen) > 1 or not parser.refuses, "no input was refused: the mutations do not reach the parser"


@pytest.mark.parametrize("name", PARSERS)
def test_the_corpus_is_kept(name: str) -> None:
    assert corpus(name)


def test_the_recorded_run_is_that_of_the_page() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page.partition("<!-- parsers -->")[2].partition("<!-- end -->")[0], re.M)
    run = msgspec.json.decode((ROOT / "docs" / "results" / "fuzz.json").read_bytes())
    assert named == list(run["parsers"])
    assert set(named) <= set(PARSERS)
    assert all(each["inputs"] >= 1_000_000 for each in run["parsers"].values())
    assert {"superblock", "record", "settings"} <= set(named)
    assert f"{run['date']}, seed {run['seed']}" in page
