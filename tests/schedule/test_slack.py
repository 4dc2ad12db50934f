"""The table predicts what was measured, says nothing of what was not, and is found again under its identity alone."""

import random
from collections import deque
from pathlib import Path

import pytest

from tutti_sglang.schedule import slack
from tutti_sglang.schedule.slack import SAMPLES, Curve, Table

IDENTITY = {"model": "m", "device": "d", "tp": "1", "sglang": "0"}


def _true(new: float, prefix: float) -> float:
    return 0.004 + 2e-5 * new + 3e-9 * new * (prefix + new / 2)


def _filled(*, noise: float = 0.0, rounds: int = 5) -> Table:
    table, rng = Table(IDENTITY), random.Random(1)
    for _ in range(rounds):
        for new in (64, 256, 1024, 4096):
            for prefix in (0, 1024, 16384):
                table.observe(new, prefix, _true(new, prefix) * rng.uniform(1 - noise, 1 + noise))
    return table


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_between_what_was_measured_it_predicts(noise: float) -> None:
    table = _filled(noise=noise)
    for new, prefix in ((128, 0), (700, 3000), (2048, 8192), (4096, 16384), (90, 500), (8192, 0)):
        assert table.expected(new, prefix) == pytest.approx(_true(new, prefix), rel=0.05 + 1.5 * noise)


def test_outliers_do_not_move_it() -> None:
    table = _filled()
    before = table.expected(1024, 0)
    for _ in range(SAMPLES // 2):
        table.observe(1024, 0, 100 * _true(1024, 0))
    assert table.expected(1024, 0) == pytest.approx(before, rel=0.01)


def test_a_machine_that_became_slower_is_believed_soon() -> None:
    table = _filled()
    for _ in range(SAMPLES):
        table.observe(1024, 0, 3 * _true(1024, 0))
    assert table.expected(1024, 0) == pytest.approx(3 * _true(1024, 0), rel=0.1)


def test_nothing_is_claimed_of_too_little() -> None:
    table = Table(IDENTITY)
    assert table.expected(1024, 0) == table.recompute(1024, 0, 0) == table.slack(1024, 0) == 0
    for _ in range(20):
        table.observe(1024, 0, 0.1)  # of one shape alone nothing follows for others
    assert not table.known
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        table.observe(64, 0, seconds)
    assert table.count == 20


def test_a_long_prompt_is_computed_in_chunks() -> None:
    table = _filled()
    parts = sum(table.expected(1024, done) for done in range(0, 4096, 1024))
    assert table.recompute(4096, 0, 1024) == pytest.approx(parts)
    assert table.recompute(4096, 0, 0) == pytest.approx(table.expected(4096, 0))


def test_slack_is_where_io_beside_a_step_cost_it_nothing() -> None:
    table = _filled()
    assert table.slack(1024, 0) == 0
    for _ in range(3):
        table.observe(1024, 0, 1.01 * _true(1024, 0), beside=True)
        table.observe(256, 0, 1.5 * _true(256, 0), beside=True)
    assert table.slack(1024, 0) == pytest.approx(_true(1024, 0), rel=0.01)
    assert table.slack(256, 0) == 0


def test_it_is_found_again_under_its_identity_alone(tmp_path: Path) -> None:
    table = _filled(noise=0.1)
    table.save(tmp_path)
    again = Table.load(tmp_path, dict(reversed(IDENTITY.items())))
    assert again.rows() == table.rows()
    assert again.expected(700, 3000) == pytest.approx(table.expected(700, 3000), rel=0.02)
    for name in IDENTITY:
        assert not Table.load(tmp_path, IDENTITY | {name: "other"}).known


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 99}', b"\xff" * 100])
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    path = _filled().save(tmp_path)
    path.write_bytes(content)
    table = Table.load(tmp_path, IDENTITY)
    assert not table.known
    table.observe(64, 0, 0.1)
    assert table.save(tmp_path) == path


def test_loads_between_and_beyond_the_sizes_that_were_seen() -> None:
    curve = Curve()
    assert curve.expected(1 << 20) == 0
    for _ in range(5):
        for size in (1 << 20, 1 << 24):
            curve.observe(size, 1e-3 + size / 1e9)
    curve.observe(1 << 24, 60.0)  # once
    assert curve.expected(0) == 0
    assert curve.expected(1 << 24) == pytest.approx(1e-3 + (1 << 24) / 1e9, rel=0.01)
    assert curve.expected(1 << 22) == pytest.approx(1e-3 + (1 << 22) / 1e9, rel=0.05)
    assert curve.expected(1 << 28) == pytest.approx((1 << 28) / 1e9, rel=0.1)
    assert curve.expected(1 << 10) <= curve.expected(1 << 20)


def test_drives_that_became_slow_at_one_size_are_slow_at_all() -> None:
    curve = Curve()
    for _ in range(9):
        for power in (18, 20, 22, 24):
            curve.observe(1 << power, (1 << power) / 1e9)
    for _ in range(3):
        curve.observe(1 << 20, 2.0)
    assert curve.expected(1 << 24) == pytest.approx(32.0)
    assert curve.expected(1 << 18) < 0.1  # of smaller ones it says nothing


def test_drives_that_became_fast_at_one_size_are_fast_at_smaller_ones() -> None:
    curve = Curve()
    for _ in range(9):
        for power in (18, 20, 22):
            curve.observe(1 << power, 10.0 + power)
    for _ in range(3):
        curve.observe(1 << 22, 0.01)
    assert curve.expected(1 << 18) <= 0.01
    assert curve.expected(1 << 24) == pytest.approx(0.04)


def test_a_shape_counts_as_measured_when_it_was_seen_alone_and_beside_io() -> None:
    table = _filled()
    assert not table.hides
    assert not table.measured(1024, 0)
    table.observe(1024, 0, 9.0, beside=True)
    assert table.hides
    assert table.measured(1024, 0)
    assert table.slack(1024, 0) == 0, "it was measured, and hides nothing"
    assert not table.measured(64, 0)


def test_a_curve_can_be_asked_while_the_first_load_of_its_size_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    curve, asked = Curve(), []

    class Slow(deque[tuple[float, float]]):
        def append(self, load: tuple[float, float]) -> None:
            asked.append(curve.expected(1 << 24))  # another thread, just now
            super().append(load)

    monkeypatch.setattr(slack, "deque", Slow)
    curve.observe(1 << 20, 0.5)
    curve.observe(1 << 24, 8.0)
    assert asked == [0.0, pytest.approx(8.0)]
    assert curve.expected(1 << 24) == 8.0


def test_two_threads_may_learn_at_once() -> None:
    table = Table(IDENTITY)

    class Shared(deque[tuple[int, float, float, bool]]):
        def __bool__(self) -> bool:
            return True  # there was one a moment ago, which the other thread has taken

    table._noted = Shared()
    table.note(64, 0, 0.5)
    table.learn()
    assert table.count == 1
