"""A page is written at its second sight; nothing is written beyond the daily budget."""

import datetime
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.config import Config
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import admission
from tutti_sglang.store.admission import Admission, Seen
from tutti_sglang.store.index import Index
from tutti_sglang.store.keys import KEY_SIZE


def test_a_key_is_known_the_second_time_and_new_the_third() -> None:
    seen, keys = Seen(), secrets.token_bytes(100 * KEY_SIZE)
    assert not seen.again(keys).any()
    assert seen.again(keys).all()
    assert not seen.again(keys).any()


def test_other_keys_are_not_taken_for_known() -> None:
    seen = Seen(1 << 10)
    for _ in range(200):
        assert not seen.again(secrets.token_bytes(100 * KEY_SIZE)).any()


def test_most_recent_keys_are_remembered_and_old_ones_make_room() -> None:
    seen = Seen(1 << 12)
    old, new = secrets.token_bytes(20_000 * KEY_SIZE), secrets.token_bytes(400 * KEY_SIZE)
    seen.again(old)
    seen.again(new)
    assert seen.again(new).mean() > 0.9
    assert seen.again(old).mean() < 0.3


def test_keys_that_are_no_digests_are_told_apart_too() -> None:
    seen = Seen()
    keys = b"".join(number.to_bytes(KEY_SIZE, "big") for number in range(10_000))
    assert not seen.again(keys).any()
    assert seen.again(keys).mean() > 0.98


def test_a_key_twice_in_a_batch_and_no_keys() -> None:
    seen, key = Seen(), secrets.token_bytes(KEY_SIZE)
    seen.again(key * 2)
    assert seen.again(key).all()
    assert seen.again(b"").tolist() == []
    assert np.array_equal(seen.again(b""), np.empty(0, np.bool_))


def test_days_follow_each_other_in_utc() -> None:
    late = datetime.datetime(2026, 1, 31, 23, 59, tzinfo=datetime.UTC)
    assert admission.day(late + datetime.timedelta(minutes=1)) == admission.day(late) + 1
    west = late.astimezone(datetime.timezone(datetime.timedelta(hours=-8)))
    assert admission.day(west.astimezone(datetime.UTC)) == admission.day(late)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = Index(tmp_path / "index.db", Metrics(CollectorRegistry()))
    yield opened
    opened.close()


def _admission(index: Index, **changes: Any) -> Admission:
    return Admission(Config(storage_dirs=("/x",), **changes), index)


def test_all_is_admitted_without_a_limit(index: Index) -> None:
    gate, keys = _admission(index), secrets.token_bytes(5 * KEY_SIZE)
    gate.wrote(np.array([1 << 30, 0], np.uint64))
    gate.flush()
    assert gate.admit(keys).all()
    assert index.count_written(admission.day(), {}) == {0: 1 << 30}, "wear is counted all the same"


def test_a_page_is_admitted_at_its_second_sight(index: Index) -> None:
    gate, keys = _admission(index, write_admission="second"), secrets.token_bytes(5 * KEY_SIZE)
    assert [gate.admit(keys).tolist() for _ in range(2)] == [[False] * 5, [True] * 5]


def test_the_budget_of_a_drive_is_that_of_all_processes_and_of_a_day(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = 1000
    monkeypatch.setattr(admission, "day", lambda: today)
    first, second = (_admission(index, daily_write_budget=1000) for _ in range(2))
    keys = secrets.token_bytes(KEY_SIZE)
    first.wrote(np.array([300, 700], np.uint64))
    first.flush()
    assert first.admit(keys).all()
    second.wrote(np.array([0, 299], np.uint64))
    second.flush()
    assert second.admit(keys).all()
    second.wrote(np.array([0, 1], np.uint64))
    assert not second.admit(keys).any(), "what it has not told the others counts too"
    second.flush()
    assert first.admit(keys).all(), "it does not know yet"
    first.flush()
    assert not first.admit(keys).any()
    today += 1
    first.flush()
    assert first.admit(keys).all()


def test_nothing_is_counted_twice_when_the_index_was_busy(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _admission(index, daily_write_budget=1000)
    gate.wrote(np.array([400, 0], np.uint64))
    with monkeypatch.context() as patch:
        patch.setattr(index, "count_written", lambda *_: (_ for _ in ()).throw(OSError("busy")))
        with pytest.raises(OSError, match="busy"):
            gate.flush()
    gate.wrote(np.array([100, 0], np.uint64))
    gate.flush()
    gate.flush()
    assert index.count_written(admission.day(), {}) == {0: 500}
