"""What is read ahead for a request is what pays by measured times; the rest is computed."""

from pathlib import Path

import pytest

from tests.integration.linkers import PAGE, Request, admitted, keys, make, mha, offload
from tutti_sglang.integration.linker import TuttiLinker

PAGES = 8
LOAD, NOT = "load", "recompute"


def taught(linker: TuttiLinker, seconds: float) -> None:
    """Prefills take a millisecond a token, loads so many `seconds` a page."""
    timing, size = linker._tier.timing, linker.pools["kv"].view.page_bytes
    for new in (16, 64, 256):
        for prefix in (0, 0, 64, 64):
            timing.table.observe(new, prefix, 1e-3 * new)
    assert timing._judge
    for pages in (1, 2, 4, 8):
        timing._judge.measured(pages * size, pages * seconds)


def outcomes(linker: TuttiLinker, outcome: str) -> float:
    return linker._metrics.value("tutti_break_even_requests", outcome=outcome)


def stored(disk: Path, **settings: str) -> TuttiLinker:
    linker = make(mha(), disk, **settings)
    assert offload(linker, keys(PAGES), [*range(1, PAGES + 1)])
    linker.flushed()
    return linker


@pytest.mark.parametrize(("seconds", "outcome"), [(1e-6, LOAD), (100.0, NOT)], ids=["a fast disk", "a slow one"])
def test_a_prefix_is_read_ahead_where_that_is_sooner_than_computing_it(
    disk: Path, seconds: float, outcome: str
) -> None:
    linker = stored(disk)
    taught(linker, seconds)
    before = outcomes(linker, outcome)
    request = Request(linker, "r", keys(PAGES), tokens=PAGES * PAGE + 5).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == (PAGES if outcome == LOAD else 0)
    assert outcomes(linker, outcome) == before + 1
    linker.close()


def test_all_is_read_where_nothing_was_measured_and_where_it_is_switched_off(disk: Path) -> None:
    linker = stored(disk)
    request = Request(linker, "r", keys(PAGES), tokens=PAGES * PAGE + 5).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == PAGES
    linker.close()
    linker = make(mha(), disk, break_even="off")
    request = Request(linker, "r", keys(PAGES), tokens=PAGES * PAGE + 5).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == PAGES
    linker.close()


def test_where_nothing_can_be_judged_all_is_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linker = stored(disk)
    before = linker._metrics.value("tutti_call_errors", call="break-even")
    monkeypatch.setattr(linker._tier.timing._judge, "_promise", lambda nbytes: 1 / 0)
    request = Request(linker, "r", keys(PAGES), tokens=PAGES * PAGE + 5).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == PAGES
    assert linker._metrics.value("tutti_call_errors", call="break-even") == before + 1
    linker.close()


def test_what_is_read_ahead_is_measured(disk: Path) -> None:
    linker = stored(disk)
    judge = linker._tier.timing._judge
    assert judge
    assert judge.loads.count == 0
    Request(linker, "r", keys(PAGES)).arrive()
    assert admitted(linker, "r")
    assert judge.loads.count == 1
    linker.close()
