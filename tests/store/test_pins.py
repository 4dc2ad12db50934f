"""Claims are spared for a while, and never more of them than a bound."""

import numpy as np
import pytest

from tutti_sglang.store import pins
from tutti_sglang.store.pins import PIN_SECONDS, Pins

SLOTS = np.arange(10, dtype=np.int64)


def test_a_claim_is_pinned_until_its_time_is_over_and_again_with_the_next() -> None:
    now = [100.0]
    held = Pins(lambda: now[0])
    assert not held.pinned(SLOTS).any()
    held.pin(SLOTS[2:5])
    now[0] += PIN_SECONDS / 2
    held.pin(SLOTS[4:7])
    assert np.flatnonzero(held.pinned(SLOTS)).tolist() == [2, 3, 4, 5, 6]
    now[0] += PIN_SECONDS / 2
    assert np.flatnonzero(held.pinned(SLOTS)).tolist() == [4, 5, 6]
    now[0] += PIN_SECONDS / 2
    assert not held.pinned(SLOTS).any()
    held.pin(SLOTS[:0])
    assert not held.pinned(SLOTS).any()


def test_too_many_claims_give_the_oldest_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS_MAX", 5)
    held = Pins()
    held.pin(SLOTS[:3])
    held.pin(SLOTS[3:6])
    assert np.flatnonzero(held.pinned(SLOTS)).tolist() == [3, 4, 5]
    held.pin(SLOTS)
    assert not held.pinned(SLOTS).any()


def test_what_was_written_last_is_known_for_each_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "LATEST_MAX", 4)
    held = Pins()
    assert held.latest(1, 9).tolist() == []
    held.wrote(1, SLOTS[:3])
    held.wrote(2, SLOTS[7:])
    held.wrote(1, SLOTS[3:5])
    assert held.latest(1, 9).tolist() == [1, 2, 3, 4]
    assert held.latest(1, 2).tolist() == [3, 4]
    assert held.latest(1, 0).tolist() == []
    assert held.latest(2, 9).tolist() == [7, 8, 9]
