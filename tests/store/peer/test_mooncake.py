"""The fleet over Mooncake Store: its real master, real clients that lend memory, TCP on this machine."""

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.store.kit import close_good, config, eventually, get, keys, lookup, namespace, store_pages
from tests.store.peer.fleet_kit import Fleet, join, open_peer, peer, serves, shared, worker
from tutti_sglang.config import PeerConfig
from tutti_sglang.errors import ConfigError
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import ObjectStore
from tutti_sglang.store.peer.base import PeerError
from tutti_sglang.store.peer.mooncake import own_address

ROOT = Path(__file__).parents[3]


def test_the_engine_itself_passes_its_checks() -> None:
    checks = str(Path(__file__).with_name("client_checks.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", checks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_ones_own_address_is_that_on_the_way_to_the_master() -> None:
    assert own_address("127.0.0.1:50051") == "127.0.0.1"
    with pytest.raises(PeerError, match="leads nowhere"):
        own_address("no port")


def test_without_the_wheel_opening_says_what_to_install(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "mooncake" else find(name))
    settings = config(disk, peer=PeerConfig(kind="mooncake", master="127.0.0.1:1"))
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine-non-cuda"):
        ObjectStore(settings, metrics=Metrics(CollectorRegistry()))


def test_what_one_stored_another_restores_after_the_first_is_gone(disk: Path, mooncake: Fleet) -> None:
    one = open_peer(disk / "one", mooncake.peer())
    store_pages(one, one.attach(namespace("gone")), *range(40))
    assert shared(one, 40)
    close_good(one)
    two = open_peer(disk / "two", mooncake.peer())
    ns = two.attach(namespace("gone"))
    assert not any(lookup(two, ns, *range(40)))
    assert all(get(two, ns, *range(40)))
    assert shared(two)
    assert all(lookup(two, ns, *range(40))), "it is kept"
    close_good(two)


def test_a_fleet_with_too_little_memory_forgets_and_never_lies(disk: Path, mooncake: Fleet) -> None:
    """A store of 8 MiB offers more and more to a fleet that has 64 MiB for everybody."""
    one = open_peer(disk / "one", mooncake.peer(publish="all", keep=False), max_size=256 << 20)
    two = open_peer(disk / "two", mooncake.peer(keep=False))
    tensors = (100_000,) * 2
    mine, theirs = one.attach(namespace("many", tensors)), two.attach(namespace("many", tensors))
    for start in range(0, 600, 20):
        store_pages(one, mine, *range(start, start + 20), tensors=tensors)
        assert shared(one)
    found = get(two, theirs, *range(600), tensors=tensors)
    assert any(found)
    assert not all(found)
    close_good(one)
    close_good(two)


def test_a_master_that_dies_costs_misses_until_it_is_back(disk: Path, own_fleet: Callable[..., Fleet]) -> None:
    fleet = own_fleet()
    one = open_peer(disk / "one", fleet.peer())
    two = open_peer(disk / "two", fleet.peer())
    for store in (one, two):
        store.attach(namespace())
    store_pages(one, 1, *range(10))
    assert shared(one, 10)
    fleet.master.kill()
    start = time.monotonic()
    assert not any(get(two, 1, *range(10)))
    assert time.monotonic() - start < 7
    assert eventually(lambda: not any(get(two, 1, *range(10))) and not serves(two))
    store_pages(one, 1, *range(10, 20))
    assert all(get(one, 1, *range(20))), "local service goes on"
    fleet.master.start()
    assert eventually(lambda: serves(one) and serves(two), 90)
    # A new master knows no objects: they are offered again as they are used.
    assert eventually(lambda: _put_and_get(one, two), 90)
    close_good(one)
    close_good(two)


def _put_and_get(one: ObjectStore, two: ObjectStore) -> bool:
    _put_and_get.count += 1  # type: ignore[attr-defined]
    number = 1000 + _put_and_get.count  # type: ignore[attr-defined]
    store_pages(one, 1, number)
    return shared(one) and get(two, 1, number) == [True]


_put_and_get.count = 0  # type: ignore[attr-defined]


def test_memory_that_is_gone_or_hangs_costs_misses_and_one_deadline(
    disk: Path, own_fleet: Callable[..., Fleet]
) -> None:
    fleet = own_fleet()
    one = open_peer(disk / "one", fleet.peer())
    two = open_peer(disk / "two", fleet.peer(keep=False))
    for store in (one, two):
        store.attach(namespace())
    store_pages(one, 1, *range(40))
    assert shared(one, 40)
    assert all(get(two, 1, *range(40)))
    lender = fleet.lenders[0]
    lender.signal(signal.SIGSTOP)
    start = time.monotonic()
    assert not any(get(two, 1, *range(40)))
    assert time.monotonic() - start < 7
    assert not serves(two)
    start = time.monotonic()
    assert not any(get(two, 1, *range(40)))
    assert time.monotonic() - start < 5
    lender.signal(signal.SIGCONT)
    assert eventually(lambda: serves(two) and any(get(two, 1, *range(40))), 90)
    lender.kill()
    for _ in range(10):
        assert not any(get(two, 1, *range(40)))
    fleet.lend()
    assert eventually(lambda: _put_and_get(one, two), 90)
    assert worker(two)
    assert peer(two, "get", "wrong") == 0
    close_good(one)
    close_good(two)


def test_a_master_that_is_not_there_yet_is_joined_when_it_is(disk: Path, own_fleet: Callable[..., Fleet]) -> None:
    fleet = own_fleet()
    fleet.master.kill()
    start = time.monotonic()
    store = join(disk / "one", fleet.peer())
    assert time.monotonic() - start < 20, "Mooncake's client alone would try for 90 s"
    store_pages(store, store.attach(namespace()), *range(5))
    assert not store.locate(1, keys(77)).any()
    fleet.master.start()
    assert eventually(lambda: serves(store), 90)
    close_good(store)
