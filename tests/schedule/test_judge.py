"""Break-even in service: it learns before it judges, gives one answer for a while, counts, and finds out when things
get better."""

import pytest

from tutti_sglang.metrics import Metrics
from tutti_sglang.schedule.judge import FORGET, LOADS, PROBE, REMEMBERED, Judge
from tutti_sglang.schedule.slack import Curve, Table

PAGE, NBYTES = 64, 1 << 20
FAST, SLOW = 3e9, 3e6
TOKEN = 1e-4


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def judge(metrics: Metrics, clock: Clock) -> Judge:
    table = Table({})
    for new in (64, 128, 512, 1024, 4096):
        for _ in range(3):
            table.observe(new, 0, new * TOKEN)
    return Judge(table, metrics, clock=clock)


def _see(judge: Judge, bandwidth: float) -> None:
    """Drives of this speed, as if there had never been others."""
    judge.loads = Curve()
    for size in (NBYTES, 4 * NBYTES, 16 * NBYTES):
        for _ in range(3):
            judge.loaded(size, size / bandwidth)


def _ask(judge: Judge, rid: str, pages: int = 16, prefix: int = 0) -> int:
    judge.announce(rid, prefix, pages * PAGE + 1)
    return judge.pages(rid, range(1, pages + 1), PAGE, NBYTES)


def test_all_is_loaded_until_loads_and_steps_were_measured(judge: Judge, metrics: Metrics) -> None:
    assert _ask(judge, "a") == 16
    for _ in range(LOADS - 1):
        judge.loaded(NBYTES, 100.0)
    assert _ask(judge, "b") == 16
    blank = Judge(Table({}), metrics)
    _see(blank, SLOW)
    assert _ask(blank, "c") == 16
    assert metrics.value("tutti_break_even_requests", outcome="unmeasured") == 3
    assert metrics.value("tutti_declined_objects") == 0


def test_a_lookup_that_no_request_announced_gets_all(judge: Judge) -> None:
    _see(judge, SLOW)
    assert judge.pages(None, range(1, 17), PAGE, NBYTES) == 16
    assert judge.pages("never heard of", range(1, 17), PAGE, NBYTES) == 16
    assert _ask(judge, "a", pages=0) == 0


def test_fast_drives_load_and_slow_ones_do_not_and_both_are_counted(judge: Judge, metrics: Metrics) -> None:
    _see(judge, FAST)
    assert _ask(judge, "a") == 16
    assert metrics.value("tutti_break_even_tokens") > 0
    _see(judge, SLOW)
    assert _ask(judge, "b") == 0
    assert metrics.value("tutti_break_even_requests", outcome="load") == 1
    assert metrics.value("tutti_break_even_requests", outcome="recompute") == 1
    assert metrics.value("tutti_declined_objects") == 16
    assert metrics.value("tutti_break_even_tokens") == 0


def test_a_request_that_is_asked_about_again_gets_the_same_answer_and_counts_once(
    judge: Judge, metrics: Metrics, clock: Clock
) -> None:
    _see(judge, SLOW)
    assert _ask(judge, "a") == 0
    _see(judge, FAST)
    for _ in range(8):
        assert _ask(judge, "a") == 0
    assert metrics.value("tutti_declined_objects") == 16
    clock.now += REMEMBERED
    assert _ask(judge, "a") == 16


def test_another_prefix_of_the_same_request_is_another_question(judge: Judge) -> None:
    _see(judge, SLOW)
    assert _ask(judge, "a") == 0
    _see(judge, FAST)
    assert _ask(judge, "a", prefix=64) == 16


def test_loads_before_this_one_count_until_they_are_done_or_forgotten(judge: Judge, clock: Clock) -> None:
    speed = 2 * NBYTES / (PAGE * TOKEN)  # twice as fast as computing
    _see(judge, speed)
    assert _ask(judge, "a", 64) == 64
    assert _ask(judge, "b") == 0
    clock.now += FORGET
    assert _ask(judge, "c") == 16
    judge.loaded(16 * NBYTES, 16 * NBYTES / speed)
    assert _ask(judge, "d") == 16


def test_drives_that_became_fast_are_found_out(judge: Judge, clock: Clock, metrics: Metrics) -> None:
    _see(judge, SLOW)
    clock.now += PROBE + 1
    assert _ask(judge, "a") == 1
    assert metrics.value("tutti_break_even_requests", outcome="probe") == 1
    assert _ask(judge, "b") == 0  # one is enough
    for _ in range(LOADS):
        judge.loaded(NBYTES, NBYTES / FAST)
    assert _ask(judge, "c") == 16


def test_what_it_remembers_is_bounded(judge: Judge) -> None:
    for number in range(10_000):
        judge.announce(str(number), 0, 1)
    assert len(judge._asked) <= 4096


def _far(judge: Judge, bandwidth: float) -> None:
    """A fleet of this speed, as if there had never been another."""
    judge.fetches = Curve()
    for size in (NBYTES, 4 * NBYTES, 16 * NBYTES):
        for _ in range(3):
            judge.received(size, size / bandwidth)


def _ask_far(judge: Judge, rid: str, here: int, pages: int = 16) -> int:
    judge.announce(rid, 0, pages * PAGE + 1)
    remote = [max(0, number - here) for number in range(1, pages + 1)]
    return judge.pages(rid, range(1, pages + 1), PAGE, NBYTES, remote)


def test_what_other_machines_have_is_fetched_when_that_is_sooner(judge: Judge, metrics: Metrics) -> None:
    _see(judge, FAST)
    assert _ask_far(judge, "unknown", here=8) == 16, "so that it is measured"
    _far(judge, FAST)
    assert _ask_far(judge, "a", here=8) == 16
    assert _ask_far(judge, "b", here=0) == 16
    assert metrics.value("tutti_break_even_requests", outcome="peer") == 3
    _far(judge, SLOW)
    assert _ask_far(judge, "c", here=8) == 8, "what is here is loaded, what is far is computed"
    assert _ask_far(judge, "d", here=0) == 0
    assert metrics.value("tutti_declined_objects") == 8 + 16
    _see(judge, SLOW)
    _far(judge, FAST)
    assert _ask_far(judge, "e", here=0) == 16, "a slow drive is no matter of what is elsewhere"


def test_a_fleet_that_was_too_slow_is_tried_again_with_a_page(judge: Judge, clock: Clock, metrics: Metrics) -> None:
    _see(judge, FAST)
    _far(judge, SLOW)
    assert _ask_far(judge, "a", here=4) == 4
    clock.now += PROBE + 1
    judge.loaded(NBYTES, NBYTES / FAST)  # the drives are in use all the time
    assert _ask_far(judge, "b", here=4) == 5
    assert metrics.value("tutti_break_even_requests", outcome="probe") == 1
    for _ in range(3):
        judge.received(NBYTES, NBYTES / FAST)
    assert _ask_far(judge, "c", here=4) == 16


def test_an_answer_that_is_given_again_is_one_of_what_can_be_restored_now(judge: Judge) -> None:
    _see(judge, FAST)
    assert _ask(judge, "a") == 16
    assert judge.pages("a", [4, 12, 20], PAGE, NBYTES) == 12
    assert judge.pages("a", [20], PAGE, NBYTES) == 0
    assert judge.pages("a", range(1, 21), PAGE, NBYTES) == 16
