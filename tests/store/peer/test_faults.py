"""Whatever the fleet does, the store goes on: never a wrong byte, never beyond a deadline, and it heals by itself."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.kit import close_good, eventually, get, keys, lookup, namespace, put, store_pages, value
from tests.store.peer.conftest import Files
from tests.store.peer.fleet_kit import join, open_peer, peer, serves, shared, worker
from tutti_sglang.store import ABSENT, HERE, PEER, ObjectStore
from tutti_sglang.store.peer import link

PAGES = range(20)

SLACK = 5.0
"""Seconds, for a machine that is busy with other things. A get that knew no deadline but its own would take 8."""


@pytest.fixture
def stored(disk: Path, files: Files) -> Iterator[ObjectStore]:
    """A store whose fleet has PAGES, put there by another that is gone; it keeps nothing of what arrives."""
    one = open_peer(disk / "one", files.peer())
    store_pages(one, one.attach(namespace()), *PAGES)
    assert shared(one, len(PAGES))
    close_good(one)
    store = open_peer(disk / "two", files.peer(keep=False))
    assert store.attach(namespace()) == 1
    yield store
    assert value(store, "tutti_call_errors") == 0
    store.close()


def _timed(store: ObjectStore) -> tuple[list[bool], float]:
    start = time.monotonic()
    found = get(store, 1, *PAGES)
    return found, time.monotonic() - start


def _heals(store: ObjectStore, files: Files) -> bool:
    files.mood("well")
    return eventually(lambda: serves(store) and all(get(store, 1, *PAGES)), 60)


def test_what_is_not_here_comes_from_the_fleet_in_the_same_call(stored: ObjectStore) -> None:
    store_pages(stored, 1, *range(100, 105))
    assert stored.locate(1, keys(100, *PAGES, 999)).tolist() == [HERE, *[PEER] * len(PAGES), ABSENT]
    assert get(stored, 1, 3, 100, 4, 999, 101) == [True, True, True, False, True]
    assert value(stored, "tutti_hit_objects", tier="peer") == 2
    assert not any(lookup(stored, 1, *PAGES)), "a lookup speaks of this store alone"
    received = stored.take_received()
    assert received.nbytes == 2 * 25480, "what nobody has says nothing of the network"
    assert stored.take_received().nbytes == 0


@pytest.mark.parametrize("mood", ["flip", "swap", "short"])
def test_bytes_that_are_not_what_they_should_be_are_misses_and_counted(
    stored: ObjectStore, files: Files, mood: str
) -> None:
    files.mood(mood)
    for _ in range(20):
        get(stored, 1, *PAGES)  # compares what it is given
    assert peer(stored, "get", "wrong") > 0
    assert _heals(stored, files)


def test_an_engine_that_dies_in_the_middle_of_a_get_costs_misses(stored: ObjectStore, files: Files) -> None:
    files.mood("die")
    found, took = _timed(stored)
    assert not any(found)
    assert took < SLACK
    assert _heals(stored, files)


def test_an_engine_that_hangs_holds_up_one_call_for_its_time_and_no_other(
    stored: ObjectStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "STUCK_SECONDS", 1.0)
    hung = worker(stored)
    files.mood("hang")
    found, took = _timed(stored)
    assert not any(found)
    assert took < 1.0 + SLACK
    assert not serves(stored)
    start = time.monotonic()
    for _ in range(50):
        assert not any(get(stored, 1, *PAGES))
        assert not stored.locate(1, keys(*PAGES)).any()
    assert time.monotonic() - start < 25.0, "nobody waits again: that would be 50 s"
    assert eventually(lambda: worker(stored) not in (0, hung)), "it was killed and another one started"
    assert _heals(stored, files)


def test_memory_of_a_call_that_was_given_up_is_nobodys_until_its_engine_answers_or_is_dead(
    stored: ObjectStore, files: Files
) -> None:
    assert stored.fleet
    files.mood("late")
    assert not any(_timed(stored)[0])
    assert stored.fleet.tier.memory.used > 0, "an engine may still write there"
    files.mood("well")
    assert eventually(lambda: stored.fleet and stored.fleet.tier.memory.used == 0)
    for _ in range(10):
        get(stored, 1, *PAGES)
    assert _heals(stored, files)


def test_a_fleet_that_is_down_is_left_alone_and_found_again(stored: ObjectStore, files: Files) -> None:
    files.mood("down")
    assert eventually(lambda: not any(_timed(stored)[0]) and not serves(stored))
    assert eventually(lambda: not serves(stored))
    assert all(put(stored, 1, *range(200, 210)))
    assert stored.drain(8)
    assert all(get(stored, 1, *range(200, 210))), "local service goes on"
    assert _heals(stored, files)


def test_a_store_opens_while_the_fleet_is_down_and_joins_it_later(disk: Path, files: Files) -> None:
    files.mood("down")
    start = time.monotonic()
    store = join(disk / "late", files.peer())
    assert time.monotonic() - start < 15, "opening waits for no fleet"
    store_pages(store, store.attach(namespace()), *range(5))
    assert all(get(store, 1, *range(5)))
    assert not serves(store)
    assert peer(store, "publish", "dropped") == 5
    files.mood("well")
    assert eventually(lambda: serves(store), 60)
    close_good(store)


def test_a_worker_that_is_killed_is_started_again(stored: ObjectStore, files: Files) -> None:
    for _ in range(3):
        assert eventually(lambda: serves(stored))
        os.kill(worker(stored), signal.SIGKILL)
        get(stored, 1, *PAGES)
        assert _heals(stored, files)


def test_a_worker_that_is_stopped_is_killed(stored: ObjectStore, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "STUCK_SECONDS", 0.5)
    stopped = worker(stored)
    os.kill(stopped, signal.SIGSTOP)
    assert not any(get(stored, 1, *PAGES))
    assert eventually(lambda: worker(stored) not in (0, stopped))
    assert _heals(stored, files)


def test_a_slow_fleet_is_asked_no_longer_than_a_lookup_may_take(stored: ObjectStore, files: Files) -> None:
    files.mood("hang")
    start = time.monotonic()
    assert not stored.locate(1, keys(*PAGES)).any()
    assert time.monotonic() - start < 0.1 + SLACK
    assert _heals(stored, files)


def test_what_arrives_is_kept_within_bounds_and_then_comes_from_here(disk: Path, files: Files) -> None:
    one, two = (open_peer(disk / name, files.peer()) for name in ("one", "two"))
    for store in (one, two):
        store.attach(namespace())
    store_pages(one, 1, *PAGES)
    assert shared(one, len(PAGES))
    assert all(get(two, 1, *PAGES))
    assert shared(two)
    assert two.drain(8)
    assert all(lookup(two, 1, *PAGES))
    files.mood("down")
    assert all(get(two, 1, *PAGES))
    assert peer(two, "keep", "stored") == len(PAGES)
    assert peer(two, "publish", "stored") == 0, "what came from the fleet is not offered to it"
    close_good(one)
    close_good(two)


@pytest.mark.parametrize(("policy", "after_one", "after_two"), [("none", 0, 0), ("second", 0, 5), ("all", 5, 5)])
def test_what_the_policy_names_is_published(
    disk: Path, files: Files, policy: str, after_one: int, after_two: int
) -> None:
    store = open_peer(disk / "one", files.peer(publish=policy))
    store_pages(store, store.attach(namespace()), *range(5))
    assert shared(store)
    assert len(files.objects) == after_one
    for _ in range(3):
        assert all(get(store, 1, *range(5)))
        assert shared(store)
        assert len(files.objects) == after_two
    assert peer(store, "publish", "stored") == after_two, "once"
    close_good(store)


def test_who_only_reads_does_not_publish(disk: Path, files: Files) -> None:
    """Of KV that ranks hold alike one writes; the others find it in the same store."""
    writer = open_peer(disk / "one", files.peer(publish="second"))
    reader = open_peer(disk / "one", files.peer(publish="second"))
    for store in (writer, reader):
        store.attach(namespace())
    store_pages(writer, 1, *range(5))
    for _ in range(4):
        assert all(get(reader, 1, *range(5)))
    assert shared(reader)
    assert not files.objects
    assert all(get(writer, 1, *range(5)))
    assert shared(writer, 5)
    reader.close()
    close_good(writer)


def test_a_fleet_that_does_not_keep_up_costs_publications_and_no_put(
    disk: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti_sglang.store.peer.sharing.MOST_KEYS", 16)
    store = open_peer(disk / "one", files.peer(timeout=5.0))
    store.attach(namespace())
    files.mood("slow")
    start = time.monotonic()
    for number in range(12):
        store_pages(store, 1, *range(10 * number, 10 * number + 10))
    assert time.monotonic() - start < 20
    assert peer(store, "publish", "dropped") > 0
    assert all(get(store, 1, *range(120)))
    close_good(store)


def test_equal_prompts_of_other_weights_find_nothing(disk: Path, files: Files) -> None:
    one, two = (open_peer(disk / name, files.peer()) for name in ("one", "two"))
    store_pages(one, one.attach(namespace("m")), *PAGES)
    assert shared(one, len(PAGES))
    other = two.attach(namespace("other"))
    assert not two.locate(other, keys(*PAGES)).any()
    assert not any(get(two, other, *PAGES))
    alone = two.attach(namespace("m"), share=False)
    assert not two.locate(alone, keys(*PAGES)).any()
    one.close()
    two.close()


def test_clear_takes_the_namespace_out_of_the_fleet_and_no_other(disk: Path, files: Files) -> None:
    store = open_peer(disk / "one", files.peer())
    first, second = store.attach(namespace("a")), store.attach(namespace("b"))
    store_pages(store, first, *range(5))
    store_pages(store, second, *range(7))
    assert shared(store, 12)
    store.clear(first)
    assert eventually(lambda: len(files.objects) == 7)
    assert not store.locate(first, keys(*range(5))).any()
    close_good(store)


def test_closing_leaves_no_process_and_waits_for_no_fleet(disk: Path, files: Files) -> None:
    for mood in ("well", "hang", "down"):
        store = open_peer(disk / mood, files.peer())
        store_pages(store, store.attach(namespace()), *range(5))
        pid = worker(store)
        files.mood(mood)
        start = time.monotonic()
        assert store.close()
        assert store.close()
        assert time.monotonic() - start < 9
        assert not pid or not Path(f"/proc/{pid}").exists()
        files.mood("well")


def test_a_page_that_is_too_large_for_the_memory_stays_at_home(disk: Path, files: Files) -> None:
    store = open_peer(disk / "one", files.peer(memory=1 << 20))
    ns = store.attach(namespace(tensors=(200_000,)))
    store_pages(store, ns, 1, 2, tensors=(200_000,))
    assert shared(store)
    assert not files.objects
    assert not store.locate(ns, keys(3)).any()
    close_good(store)
