"""A fleet whose clients find each other through Mooncake's HTTP metadata server, the real one. It keeps what it knows
in memory: clients that know each other go on without it, others are strangers until the lender has told it again."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.kit import close_good, eventually, get, keys, namespace, store_pages
from tests.store.peer.fleet_kit import Fleet, Process, join, open_peer, peer, require, serves, shared, worker
from tutti_sglang.store import ObjectStore

PAGES = range(10)
MINE = range(100, 110)

SLACK = 5.0
"""Seconds, for a machine that is busy with other things; a get has 2 s, and 8 without a fleet's own deadline."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Its directory and its memory serve."""
    require()
    fleet = Fleet(tmp_path / "fleet", directory=True)
    try:
        _directory(fleet).wait_for("HTTP Metadata Server started")
        fleet.lend()
        yield fleet
    finally:
        fleet.close()


def _directory(fleet: Fleet) -> Process:
    assert fleet.directory
    return fleet.directory


def _goes_on_alone(store: ObjectStore) -> bool:
    """Whether it serves what is here, and ends in time what is nowhere."""
    store_pages(store, 1, *MINE)
    start = time.monotonic()
    good = all(get(store, 1, *MINE)) and not any(get(store, 1, 999)) and not store.locate(1, keys(998)).any()
    return good and time.monotonic() - start < 2 + SLACK


def _timed(store: ObjectStore, *numbers: int) -> list[bool]:
    """What a get finds; it compares the bytes, and has to end in time."""
    start = time.monotonic()
    found = get(store, 1, *numbers)
    assert time.monotonic() - start < 2 + SLACK
    return found


def _meet(one: ObjectStore, two: ObjectStore, fresh: Iterator[int]) -> bool:
    """Whether the one gets what the other offers now, once the fleet is asked again."""

    def met() -> bool:
        number = next(fresh)
        store_pages(one, 1, number)
        return shared(one) and get(two, 1, number) == [True]

    return eventually(met, 90)


def _attached(store: ObjectStore) -> ObjectStore:
    assert store.attach(namespace()) == 1
    return store


def test_a_directory_that_is_down_at_start_holds_up_nobody_and_is_found_later(disk: Path, fleet: Fleet) -> None:
    _directory(fleet).kill()
    start = time.monotonic()
    one, two = (_attached(join(disk / name, fleet.peer(keep=False))) for name in ("one", "two"))
    assert time.monotonic() - start < 20, "opening waits for no fleet"
    assert _goes_on_alone(one)
    assert not serves(one)
    _directory(fleet).start()
    assert eventually(lambda: serves(one) and serves(two), 90)
    fleet.lenders[0].kill()
    fleet.lend()  # who is new to the directory; the one before is known to nobody any more
    assert _meet(one, two, iter(range(1000, 2000)))
    for store in (one, two):
        assert peer(store, "get", "wrong") == 0
        close_good(store)


def test_clients_that_know_each_other_go_on_while_the_directory_is_gone_and_others_come_to_it_when_it_is_back(
    disk: Path, fleet: Fleet
) -> None:
    one, two = (_attached(open_peer(disk / name, fleet.peer(keep=False))) for name in ("one", "two"))
    store_pages(one, 1, *PAGES)
    assert shared(one, len(PAGES))
    assert all(_timed(two, *PAGES))
    _directory(fleet).kill()
    for _ in range(4):
        assert all(_timed(two, *PAGES)), "who has met the lender needs nobody to find it"
    assert _goes_on_alone(two)
    three = _attached(join(disk / "three", fleet.peer(keep=False)))
    assert _goes_on_alone(three)
    assert not any(_timed(three, *PAGES))
    assert not serves(three)
    _directory(fleet).start()
    assert eventually(lambda: serves(three), 90)
    for _ in range(6):
        assert not any(_timed(three, *PAGES)), "its lender is a stranger to a directory that forgot everybody"
        assert all(_timed(two, *PAGES))
    fleet.lenders[0].kill()
    fleet.lend()
    fresh = iter(range(1000, 3000))
    assert _meet(one, three, fresh)
    assert _meet(three, two, fresh)
    for store in (one, two, three):
        assert peer(store, "get", "wrong") == 0
        close_good(store)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_directory_that_dies_or_hangs_while_its_clients_are_started_again_costs_misses(
    disk: Path, fleet: Fleet, number: int
) -> None:
    """A worker that ends has to find everybody anew; with a directory that only hung, it does."""
    one, two = (_attached(open_peer(disk / name, fleet.peer(keep=False))) for name in ("one", "two"))
    store_pages(one, 1, *PAGES)
    assert shared(one, len(PAGES))
    assert all(_timed(two, *PAGES))
    _directory(fleet).signal(number)
    os.kill(worker(two), signal.SIGKILL)
    assert eventually(lambda: not any(_timed(two, *PAGES)) and not serves(two))
    assert _goes_on_alone(two)
    if number == signal.SIGKILL:
        _directory(fleet).process.wait()
        _directory(fleet).start()
        fleet.lenders[0].kill()
        fleet.lend()
    else:
        _directory(fleet).signal(signal.SIGCONT)
    fresh = iter(range(1000, 2000))
    assert _meet(one, two, fresh)
    if number == signal.SIGSTOP:
        assert eventually(lambda: all(_timed(two, *PAGES)), 60)
    for store in (one, two):
        assert peer(store, "get", "wrong") == 0
        close_good(store)
