"""When the fleet is asked."""

import pytest

from tutti_sglang.store.peer.breaker import FIRST_PAUSE, LONGEST_PAUSE, STRIKES, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told() -> list[bool]:
    return []


@pytest.fixture
def breaker(clock: Clock, told: list[bool]) -> Breaker:
    made = Breaker(lambda works, _: told.append(works), clock)
    assert not made.closed
    assert made.due(), "nothing is known yet: find out"
    made.tried(True)
    return made


def test_some_failures_in_a_row_open_it_and_success_between_them_does_not(breaker: Breaker, told: list[bool]) -> None:
    for _ in range(3 * STRIKES):
        breaker.failed("no")
        breaker.worked(moved=False)
    assert breaker.closed
    for _ in range(STRIKES):
        breaker.failed("no")
    assert not breaker.closed
    assert told == [True, False]


def test_one_late_answer_opens_it(breaker: Breaker) -> None:
    breaker.failed("late", late=True)
    assert not breaker.closed


def test_pauses_grow_until_bytes_have_moved(breaker: Breaker, clock: Clock) -> None:
    pauses = []
    for _ in range(8):
        breaker.failed("late", late=True)
        start = clock.now
        while not breaker.due():
            clock.now += 0.5
        pauses.append(clock.now - start)
        breaker.tried(True)
        breaker.worked(moved=False)
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    breaker.worked(moved=True)
    breaker.failed("late", late=True)
    clock.now += FIRST_PAUSE
    assert breaker.due()


def test_attempts_that_fail_wait_longer_and_are_told_once(breaker: Breaker, clock: Clock, told: list[bool]) -> None:
    breaker.tried(False)
    breaker.tried(False)
    clock.now += FIRST_PAUSE
    assert not breaker.due()
    clock.now += FIRST_PAUSE
    assert breaker.due()
    breaker.tried(True)
    assert told == [True, False, True]
