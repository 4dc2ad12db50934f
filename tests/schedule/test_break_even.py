"""The decision: never slower than the better of loading all and nothing, by the measure it was given."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_sglang.schedule.break_even import MARGIN, Case, Costs, decide, shortest_that_pays

PAGE, NBYTES = 64, 1 << 20


def costs(latency: float, bandwidth: float, token: float, square: float = 0.0) -> Costs:
    """A load of `latency` seconds and `bandwidth` bytes/s; a prefill of `token` seconds a token and attention."""
    return Costs(
        lambda nbytes: latency + nbytes / bandwidth, lambda new, prefix: token * new + square * new * (prefix + new / 2)
    )


def case(pages: int, *, prefix: int = 0, rest: int = 1, queued: int = 0) -> Case:
    return Case(range(1, pages + 1), PAGE, NBYTES, prefix, pages * PAGE + rest, queued)


def test_a_fast_drive_loads_all_and_a_slow_one_nothing() -> None:
    assert decide(case(16), costs(1e-3, 3e9, 1e-4)).pages == 16
    slow = decide(case(16), costs(1e-3, 3e6, 1e-4))
    assert slow.pages == 0
    assert slow.outcome == "recompute"


def test_a_short_prefix_is_computed_and_a_long_one_loaded() -> None:
    drive = costs(20e-3, 3e9, 1e-4)
    assert decide(case(2), drive).pages == 0
    assert decide(case(64), drive).pages == 64
    shortest = shortest_that_pays(drive, PAGE, NBYTES)
    assert decide(case(shortest // PAGE), drive).pages
    assert not decide(case(shortest // PAGE // 2), drive).pages


def test_what_is_queued_counts() -> None:
    drive = costs(1e-3, 1e9, 1e-4)
    assert decide(case(16), drive).pages == 16
    assert decide(case(16, queued=1 << 30), drive).pages == 0


def test_where_the_end_of_a_load_is_dear_the_part_that_pays_is_loaded() -> None:
    steep = Costs(lambda nbytes: (nbytes / NBYTES) ** 2 * 1e-3, lambda new, prefix: new * 1e-4)
    decision = decide(case(16), steep)
    assert 0 < decision.pages < 16
    assert decision.outcome == "part"
    assert "ms" in decision.explain()


def test_only_lengths_that_can_be_restored_are_chosen() -> None:
    lengths = [3, 9, 40]
    for bandwidth in (1e5, 1e7, 1e8, 1e9, 1e11):
        decision = decide(Case(lengths, PAGE, NBYTES, 0, 41 * PAGE), costs(0, bandwidth, 1e-4))
        assert decision.pages in (0, *lengths)


@settings(max_examples=300, deadline=None)
@given(
    pages=st.integers(1, 3000),
    prefix=st.integers(0, 100_000),
    latency=st.floats(0, 0.1),
    bandwidth=st.floats(1e5, 1e11),
    token=st.floats(1e-7, 1e-2),
    square=st.floats(0, 1e-7),
    queued=st.integers(0, 1 << 34),
)
def test_a_decision_is_never_worse_than_both_extremes(
    pages: int, prefix: int, latency: float, bandwidth: float, token: float, square: float, queued: int
) -> None:
    measured = costs(latency, bandwidth, token, square)
    asked = case(pages, prefix=prefix, queued=queued)
    decision = decide(asked, measured)
    everything = measured.load(queued + pages * NBYTES) + measured.recompute(1, prefix + pages * PAGE)
    nothing = measured.recompute(asked.new, prefix)
    assert decision.best <= (1 + MARGIN) * min(everything, nothing) * (1 + 1e-9)
    assert decision.loading == pytest.approx(everything)
    assert decision.recomputing == pytest.approx(nothing)
