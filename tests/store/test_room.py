"""Slots that this process holds are neither lost nor given back twice when the index cannot be written to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.kit import close_good, namespace, open_store, put, store_pages
from tutti_sglang.errors import StoreError
from tutti_sglang.store import ObjectStore
from tutti_sglang.store.slots import slots_of


def _busy(*_: Any, **__: Any) -> Any:
    raise StoreError("database is locked")


def _adds_up(store: ObjectStore) -> bool:
    """Every leased slot is one that this process knows of."""
    room = store._room
    known = [slots_of(lease._ranges) for lease in room._leases.values()] + room._unwanted
    return len(np.unique(np.concatenate(known))) == store._parts.index.usage().leased


@pytest.mark.parametrize("what", ["lease", "add_segment", "segments"])
def test_slots_that_were_taken_before_a_failure_stay_leased(
    disk: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(5))
    with monkeypatch.context() as patch:
        patch.setattr(store._parts.index, what, _busy)
        for start in range(100, 200, 20):
            put(store, ns, *range(start, start + 20))
            assert store.drain(8)
        assert _adds_up(store)
    store_pages(store, ns, *range(200, 260))
    assert _adds_up(store)
    close_good(store)


def test_what_is_given_back_while_the_index_is_busy_is_given_back_once(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(5))
    room, space = store._room, store._parts.spaces[ns]
    mine = room.take(space, 10)
    assert len(mine) == 10
    index_give_back: Callable[..., int] = store._parts.index.give_back
    monkeypatch.setattr(store._parts.index, "give_back", _busy)
    room.give_back(mine)
    with pytest.raises(StoreError):
        room.settle()
    assert _adds_up(store)
    given: list[int] = []

    def record(owner: str, slots: Any) -> int:
        given.extend(slots.tolist())
        return index_give_back(owner, slots)

    monkeypatch.setattr(store._parts.index, "give_back", record)
    room.settle()
    room.settle()
    assert sorted(given) == sorted(mine.tolist())
    assert _adds_up(store)
    close_good(store)
