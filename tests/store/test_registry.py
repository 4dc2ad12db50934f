"""Namespaces as all processes see them: one number each, one hand, one budget, heat that cools."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.metrics import Metrics
from tutti_sglang.store import registry
from tutti_sglang.store.index import Index
from tutti_sglang.store.namespace import Namespace


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[list[Index]]:
    """Two processes' worth."""
    opened = [Index(tmp_path / "index.db", Metrics(CollectorRegistry())) for _ in range(2)]
    yield opened
    for index in opened:
        index.close()


def _namespace(model: str) -> Namespace:
    return Namespace(model=model, weights="w", dtype="bfloat16", page_size=64, tensors=(4096,) * 4, layers=(0, 2))


def test_a_namespace_has_one_number(indexes: list[Index]) -> None:
    a, b = (index.namespace_id(_namespace("a")) for index in indexes)
    assert a == b != indexes[1].namespace_id(_namespace("b"))
    assert {row.readable for row in indexes[0].namespaces().values()} == {
        _namespace("a").readable(),
        _namespace("b").readable(),
    }


def test_sweeping_processes_get_different_stretches(indexes: list[Index]) -> None:
    number = indexes[0].namespace_id(_namespace("a"))
    starts: list[int] = []

    def sweep(index: Index) -> None:
        for _ in range(50):
            starts.append(index.move_hand(number, 3, 900))

    threads = [threading.Thread(target=sweep, args=(index,)) for index in indexes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(starts) == list(range(0, 300, 3))
    assert indexes[0].move_hand(number, 700, 900) == 300
    assert indexes[0].move_hand(number, 1, 900) == 100
    assert indexes[0].move_hand(number, 1, 7) == 101 % 7, "the namespace has shrunk"


def test_heat_adds_up_and_cools_and_writing_keeps_a_namespace_in_use(
    indexes: list[Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr(registry.time, "time", lambda: now)
    hot, cold = (indexes[0].namespace_id(_namespace(model)) for model in "ab")
    indexes[0].add_heat({hot: 1000})
    indexes[1].add_heat({hot: 1000, cold: 0})
    now += 3600
    shares = {share.namespace: share for share in indexes[1].shares({hot: 2 << 20})}
    assert shares[hot] == (hot, 2 << 20, 1000, 3600)
    assert shares[cold] == (cold, 0, 0, 3600)
    indexes[1].add_heat({hot: 500, cold: 0})
    shares = {share.namespace: share for share in indexes[0].shares({})}
    assert (shares[hot].heat, shares[hot].idle, shares[cold].idle) == (1500, 0, 0)
    now -= 7200
    assert indexes[0].shares({})[0].idle == 0, "a clock that was set back"


def test_bytes_written_are_counted_by_day_and_drive_over_all_processes(indexes: list[Index]) -> None:
    assert indexes[0].count_written(7, {0: 100, 3: 1}) == {0: 100, 3: 1}
    assert indexes[1].count_written(7, {0: 50}) == {0: 150, 3: 1}
    assert indexes[0].count_written(8, {0: 1 << 50}) == {0: 1 << 50}
    assert indexes[0].count_written(7, {}) == {0: 150, 3: 1}
