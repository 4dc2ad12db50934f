"""Doubts pass: what is hidden comes back, and then costs nothing any more."""

import time

import numpy as np
import pytest

from tutti_sglang.store import doubts as module
from tutti_sglang.store.doubts import Doubts

KEYS = [bytes([n]) * 32 for n in range(4)]


def test_hidden_objects_come_back_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HIDDEN_SECONDS", 0.05)
    doubts = Doubts()
    assert not doubts.any
    doubts.hide(1, KEYS[:2])
    assert doubts.trusted(1, KEYS).tolist() == [False, False, True, True]
    assert doubts.trusted(2, KEYS).all(), "of another namespace"
    time.sleep(0.1)
    assert doubts.trusted(1, KEYS).all()
    assert not doubts.condemned()
    assert not doubts.any, "every lookup would go through its keys one by one"


def test_condemned_objects_stay_so_until_they_are_gone() -> None:
    doubts = Doubts()
    doubts.condemn(1, KEYS[:2], np.array([7, 8]))
    doubts.hide(1, KEYS[:1])
    assert doubts.trusted(1, KEYS).tolist() == [False, False, True, True]
    ((namespace, (keys, slots)),) = doubts.condemned().items()
    assert (namespace, keys, slots.tolist()) == (1, KEYS[:2], [7, 8])
    doubts.settled(1, keys)
    assert doubts.trusted(1, KEYS).all()
    assert not doubts.any
