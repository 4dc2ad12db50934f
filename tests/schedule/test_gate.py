"""The gate tells the windows what the scheduler runs, and the table how long it took."""

import uuid
from collections.abc import Iterator

import pytest

from tutti_sglang.engine.rows import Rows
from tutti_sglang.engine.window import Window
from tutti_sglang.metrics import Metrics
from tutti_sglang.schedule.gate import MOST_PENDING, Gate
from tutti_sglang.schedule.rules import FOREVER, LONGEST_STEP, Mode, heard_until, writes_until
from tutti_sglang.schedule.slack import Table

S = 1_000_000_000


class Clock:
    now = 1000 * S

    def __call__(self) -> int:
        return self.now


class Mark:
    """An event on a device that does not exist here."""

    def __init__(self) -> None:
        self.done: float | None = None

    def seconds(self) -> float | None:
        return self.done


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def window(metrics: Metrics, clock: Clock) -> Iterator[Window]:
    opened = Window(Rows(uuid.uuid4().hex), metrics, (0,), clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def gate(metrics: Metrics, clock: Clock, window: Window) -> Gate:
    gate = Gate(metrics, clock)
    gate.attach(window)
    return gate


def _open(window: Window, clock: Clock) -> bool:
    with window.turn((0,), clock.now / S) as mine:
        return mine


def _table(seconds: float) -> Table:
    table = Table({})
    for new in (64, 512, 1024):
        for _ in range(3):
            table.observe(new, 0, seconds)
    return table


def test_writes_start_in_decode_and_when_idle_and_not_in_a_prefill(gate: Gate, window: Window, clock: Clock) -> None:
    assert _open(window, clock)
    gate.begin(Mode.PREFILL, 1000)
    assert not _open(window, clock)
    gate.begin(Mode.DECODE)
    assert _open(window, clock)
    gate.begin(Mode.PREFILL, 1000)
    gate.idle()
    assert _open(window, clock)


def test_a_prefill_lets_writes_start_in_the_slack_that_was_measured(gate: Gate, window: Window, clock: Clock) -> None:
    table = gate.clockwork = _table(0.08)
    table.observe(1024, 0, 0.08, beside=True)
    gate.begin(Mode.PREFILL, 1024)
    assert _open(window, clock)
    clock.now += int(0.09 * S)
    assert not _open(window, clock)


def test_a_step_that_is_known_to_be_long_is_not_taken_for_silence(gate: Gate, window: Window, clock: Clock) -> None:
    table = gate.clockwork = _table(0.5)
    assert table.roughly(1024, 0) == 0  # until somebody else has fitted it
    assert table.expected(1024, 0) == pytest.approx(table.roughly(1024, 0), rel=0.1) == pytest.approx(0.5)
    gate.begin(Mode.PREFILL, 1024)
    clock.now += int(0.4 * S)
    assert not _open(window, clock)
    clock.now += int(0.3 * S)
    assert _open(window, clock)
    assert heard_until(0, 1e9) == LONGEST_STEP * S


def test_steps_are_timed_on_the_cpu_and_by_marks(gate: Gate, clock: Clock) -> None:
    table = gate.clockwork = Table({})
    step = gate.begin(Mode.PREFILL, 100)
    clock.now += S
    gate.end(step)
    marks = [Mark(), Mark()]
    for mark in marks:
        gate.launched(gate.begin(Mode.PREFILL, 1000), mark)
    gate.poll()
    table.learn()
    assert table.count == 1
    marks[0].done = 2.0
    gate.poll()
    marks[1].done = 2.0
    gate.idle()
    table.learn()
    assert [(new, seconds) for new, _, seconds, _ in table.rows()] == [(100, 1.0), (1000, 2.0)]
    gate.end(gate.begin(Mode.DECODE))
    assert table.count == 3


def test_steps_beside_io_are_told_apart_and_those_in_between_are_left_out(
    gate: Gate, window: Window, clock: Clock
) -> None:
    table = gate.clockwork = Table({})

    def step(seconds: float) -> None:
        step = gate.begin(Mode.PREFILL, 100)
        clock.now += int(seconds * S)
        gate.end(step)

    step(1.0)
    with window.reading((0,)):
        step(1.01)
        half = gate.begin(Mode.PREFILL, 100)
    clock.now += 9 * S
    gate.end(half)
    table.learn()
    assert table.count == 1
    assert table.rows() == [(100, 0, 1.0, 1.0)]


def test_a_device_that_still_computes_is_not_idle(gate: Gate, window: Window, clock: Clock) -> None:
    gate.clockwork = Table({})
    mark = Mark()
    gate.launched(gate.begin(Mode.PREFILL, 1000), mark)
    gate.idle()
    assert not _open(window, clock)
    mark.done = 0.01
    gate.idle()
    assert _open(window, clock)


def test_marks_that_never_come_are_forgotten(gate: Gate) -> None:
    for _ in range(10 * MOST_PENDING):
        gate.launched(gate.begin(Mode.PREFILL, 1), Mark())
    assert len(gate._pending) == MOST_PENDING


def test_time_is_counted_by_mode(gate: Gate, clock: Clock, metrics: Metrics) -> None:
    for mode in (Mode.PREFILL, Mode.DECODE, Mode.IDLE, Mode.PREFILL):
        gate.begin(mode)
        clock.now += 2 * S
    gate.begin(Mode.DECODE)
    assert {mode: metrics.value("tutti_step_seconds", mode=mode) for mode in ("prefill", "decode", "idle")} == {
        "prefill": 4,
        "decode": 2,
        "idle": 2,
    }


def test_nobody_is_told_who_left_or_has_windows_off(gate: Gate, window: Window, metrics: Metrics) -> None:
    assert gate.listening
    gate.detach(window)
    assert not gate.listening
    off = Window(Rows(uuid.uuid4().hex), metrics, enabled=False)
    gate.attach(off)
    assert not gate.listening
    off.close()


def test_only_a_prefill_closes_the_window() -> None:
    assert writes_until(Mode.PREFILL, 5, 0.0) == 5
    assert writes_until(Mode.PREFILL, 5, 1.0) == 5 + S
    assert all(writes_until(mode, 5, 0.0) == FOREVER for mode in Mode if mode is not Mode.PREFILL)


def test_within_a_prefill_writes_start_as_far_as_its_plan_lets_them(gate: Gate, window: Window, clock: Clock) -> None:
    step = gate.begin(Mode.PREFILL, 1000)
    assert gate.step is step
    gate.let_write(0.05)
    assert _open(window, clock)
    clock.now += S // 20
    assert not _open(window, clock)
    gate.let_write(0.05)
    gate.let_write(0.0)
    assert not _open(window, clock)


def test_a_plan_does_not_make_a_long_prefill_seem_idle(gate: Gate, window: Window, clock: Clock) -> None:
    gate.clockwork = _table(0.5)
    gate.clockwork.expected(512, 0)  # type: ignore[attr-defined]  # fits the table
    gate.begin(Mode.PREFILL, 512)
    gate.let_write(0.0)
    clock.now += 4 * S // 10
    assert not _open(window, clock), "it still computes"
