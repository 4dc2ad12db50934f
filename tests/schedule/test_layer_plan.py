"""Every byte is issued once, in the order of the layers, loads before writes, and in slack unless it is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.schedule.layer_plan import MOST_SMS, SAFE_SMS, Issue, Speed, Work, explain, fewest_sms, plan_layers

MIB = 1 << 20
RATE = 1e9

works = st.integers(1, 40).flatmap(
    lambda layers: st.builds(
        Work,
        st.lists(st.integers(0, 64 * MIB), min_size=layers, max_size=layers),
        st.integers(0, 1 << 30),
        st.lists(st.one_of(st.just(0.0), st.floats(0, 0.2)), min_size=layers, max_size=layers),
    )
)
speeds = st.lists(st.tuples(st.integers(-1, 64), st.floats(0, 1e11)), max_size=6)


def _linear(nbytes: float) -> float:
    return nbytes / RATE


def _plan(work: Work, write: float = RATE, sms: list[tuple[int, float]] | None = None) -> tuple[Issue, ...]:
    return plan_layers(work, Speed(_linear, write, sms or []))


@given(works)
def test_every_load_is_issued_once_in_order_and_in_time(work: Work) -> None:
    issues = _plan(work)
    assert len(issues) == len(work.loads)
    assert [layer for issue in issues for layer in range(issue.first, issue.end)] == list(range(len(work.loads)))
    for layer, issue in enumerate(issues):
        assert issue.end >= min(layer + 2, len(work.loads)), "the next layer would never come"


@given(works)
def test_no_write_comes_before_the_last_load_and_none_is_written_twice(work: Work) -> None:
    issues = _plan(work)
    assert all(issue.end == len(work.loads) for issue in issues if issue.writes)
    assert sum(issue.writes for issue in issues) <= work.writes
    assert all(issue.writes >= 0 for issue in issues)


@given(works)
def test_nothing_goes_beyond_the_slack_unless_it_is_due(work: Work) -> None:
    for layer, issue in enumerate(_plan(work)):
        loads = range(max(issue.first, 1), issue.end)
        took = sum(_linear(work.loads[each]) for each in loads) + issue.writes / RATE
        more = issue.end - issue.first > issue.due or issue.writes
        assert not more or took <= work.slack[layer] + 1e-9
        assert issue.due == len([each for each in range(issue.first, issue.end) if each <= layer + 1])


@given(works)
def test_slack_that_fits_more_is_not_left_unused(work: Work) -> None:
    issues = _plan(work)
    for layer, issue in enumerate(issues):
        took = sum(_linear(work.loads[each]) for each in range(max(issue.first, 1), issue.end)) + issue.writes / RATE
        left = work.slack[layer] - took
        if issue.end < len(work.loads):
            assert _linear(work.loads[issue.end]) > left - 1e-9
        elif sum(each.writes for each in issues) < work.writes:
            assert left < 2 / RATE


def test_much_slack_takes_all_at_once_and_none_takes_one_layer_ahead() -> None:
    loads = [MIB] * 6
    assert [issue.end for issue in _plan(Work(loads, 0, [1.0] * 6))] == [6] * 6
    assert [issue.end for issue in _plan(Work(loads, MIB, [0.0] * 6))] == [2, 3, 4, 5, 6, 6]


def test_half_a_layers_time_for_a_load_moves_two_with_each_and_then_writes() -> None:
    seconds = MIB / RATE
    issues = _plan(Work([MIB] * 6, 10 * MIB, [2.01 * seconds] * 6))
    assert [issue.end for issue in issues] == [3, 5, 6, 6, 6, 6]
    assert [round(issue.writes / MIB, 1) for issue in issues] == [0, 0, 1, 2, 2, 2]


def test_a_bandwidth_that_is_not_known_plans_no_write() -> None:
    assert not any(issue.writes for issue in _plan(Work([0] * 4, MIB, [1.0] * 4), write=0.0))


@given(st.integers(0, 1 << 40), st.floats(0, 10), speeds)
def test_sms_are_the_fewest_that_reach_it_and_bounded(nbytes: int, seconds: float, table: list) -> None:
    sms = fewest_sms(nbytes, seconds, table)
    assert 0 <= sms <= MOST_SMS
    if not nbytes:
        assert sms == 0
    usable = [(count, rate) for count, rate in table if 0 < count <= MOST_SMS and rate > 0]
    if nbytes and not usable:
        assert sms == SAFE_SMS
    if nbytes and usable:
        rate = max(rate for count, rate in usable if count == sms)
        enough = [count for count, each in usable if each * seconds >= nbytes]
        assert sms == min(enough) if enough else rate == max(each for _, each in usable)


@pytest.mark.parametrize(("need", "sms"), [(1e9, 4), (6e9, 8), (9e9, 16), (50e9, 16)])
def test_more_bandwidth_takes_more_sms(need: float, sms: int) -> None:
    assert fewest_sms(need, 1.0, [(4, 5e9), (8, 8e9), (16, 12e9), (24, 12e9), (64, 99e9)]) == sms


def test_the_explanation_names_layers_bytes_and_sms() -> None:
    work = Work([MIB] * 3, 0, [1.0] * 3)
    assert explain(work, _plan(work)) == "3145728 bytes in 3000.0 ms of slack; with layer 0: layers 0-2 on 16 SMs"
