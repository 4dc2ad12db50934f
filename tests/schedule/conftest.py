"""Counters of a test's own, and a directory on a real disk."""

import pytest
from prometheus_client import CollectorRegistry

from tests.store.conftest import disk
from tutti_sglang.metrics import Metrics

__all__ = ["disk"]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())
