"""Throughput beside pytest-benchmark's times."""

from collections.abc import Callable
from typing import Any

import pytest

Measure = Callable[[Callable[[], Any], int], Any]

_rates = pytest.StashKey[list[tuple[str, float]]]()


@pytest.fixture
def moving(request: pytest.FixtureRequest, benchmark: Any) -> Measure:
    """`moving(function, nbytes)` measures a function that works on `nbytes` bytes; returns what it returned."""

    def measure(function: Callable[[], Any], nbytes: int) -> Any:
        result = benchmark(function)
        if benchmark.stats:
            rate = nbytes / benchmark.stats.stats.median / 1e9
            benchmark.extra_info["GB/s"] = round(rate, 3)
            request.config.stash.setdefault(_rates, []).append((request.node.name, rate))
        return result

    return measure


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each throughput, of the median round."""
    for name, rate in terminalreporter.config.stash.get(_rates, []):
        terminalreporter.write_line(f"{rate:8.2f} GB/s  {name}")
