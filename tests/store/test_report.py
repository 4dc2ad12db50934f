"""Trouble is logged once per kind and minute, with how often it came."""

import logging

import pytest

from tutti_sglang.store.report import PERIOD, Reporter


def test_a_kind_is_logged_once_a_period_and_then_says_how_often_it_came(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    reporter = Reporter(logging.getLogger("test"), lambda: now)
    for _ in range(10):
        reporter.warn("EIO", "a drive failed")
    reporter.warn("ENOSPC", "a drive is full")
    assert [record.message for record in caplog.records] == ["tutti: a drive failed", "tutti: a drive is full"]
    caplog.clear()
    now = PERIOD
    reporter.warn("EIO", "100 % of a drive failed")
    assert caplog.messages == ["tutti: 100 % of a drive failed (9 more since the last line)"]


def test_an_unexpected_exception_is_logged_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(logging.getLogger("test"))
    for _ in range(3):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            reporter.failed("get")
    (record,) = caplog.records
    assert record.exc_info
    assert "get failed" in record.message
