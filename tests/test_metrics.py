"""Counters only go up and are read back as they were counted."""

import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.metrics import Metrics, process_metrics


def test_a_counter_sums_over_the_labels_not_given() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.add("tutti_bytes", 5, op="read")
    metrics.add("tutti_bytes", 7, op="write")
    metrics.add("tutti_bytes", 0, op="read")
    metrics.add("tutti_bytes", -3, op="read")
    assert metrics.value("tutti_bytes") == 12
    assert metrics.value("tutti_bytes", op="read") == 5


def test_a_gauge_holds_the_last_value() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.set("tutti_segment_bytes", 5, drive="0")
    metrics.set("tutti_segment_bytes", 3, drive="0")
    assert metrics.value("tutti_segment_bytes") == 3


def test_an_unknown_name_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Metrics(CollectorRegistry()).add("tutti_nonsense")


def test_a_process_has_one_set() -> None:
    assert process_metrics() is process_metrics()
