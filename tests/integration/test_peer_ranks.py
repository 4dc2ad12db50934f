"""Ranks whose store is part of a fleet, under SGLang's own tree and controller, with real clients of a real master:
whatever the fleet of one rank does, all go on with the same prefix and none waits for ever (MIN of what they have), and
what ranks hold alike is published once."""

import importlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.gloo import PAGE, Case, Rank, on_ranks, only_on
from tests.store.kit import eventually
from tests.store.peer.fleet_kit import Fleet, fleet_of, peer, serves, worker
from tutti_sglang.integration.cpu_model import built_in_model
from tutti_sglang.store import ObjectStore

PAGES = 16
PROMPT = [7 + n % 5 for n in range(PAGES * PAGE)]
WHOLE = len(PROMPT)
NONE_OF_IT = [0, 0]
ALL_OF_IT = [WHOLE, WHOLE]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _scheduler() -> None:
    """Once: this import takes half a minute on a small machine, and the ranks fork from here."""
    importlib.import_module("sglang.srt.managers.scheduler")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(tmp_path / "fleet") as fleet:
        yield fleet


def _store(rank: Rank) -> ObjectStore:
    store: ObjectStore = rank.backend._tier.store
    return store


def _joined(fleet: Fleet, store: Callable[[Rank], Path], **changes: Any) -> Case:
    """Attach a store, which keeps nothing of what arrives, to the fleet."""
    settings = msgspec.to_builtins(fleet.peer(keep=False, **changes))

    def attach(rank: Rank) -> str:
        if rank.backend is not None:
            rank.detach()
        message = rank.attach(store(rank), peer=settings, break_even="off")
        return message or ("" if _heal(rank) else "it did not join the fleet")

    return attach


def _heal(rank: Rank) -> bool:
    """Whether this rank's fleet is asked again; the others wait here too."""
    found = eventually(lambda: serves(_store(rank)), 90)
    torch.distributed.barrier()
    return found


def _compute(rank: Rank) -> int:
    """Computed, stored and offered: how many objects this rank published."""
    store = _store(rank)
    before = peer(store, "publish", "stored")  # of tests in the process that ranks fork from
    rank.compute(PROMPT)
    assert store.drain(30)
    assert store.fleet
    assert store.fleet.drain(30)
    torch.distributed.barrier()
    return int(peer(store, "publish", "stored") - before)


def _ask(rank: Rank) -> int:
    rank.flush()
    return rank.ask(PROMPT)


def _signalled(number: int) -> Callable[[Any], Any]:
    """A value for `only_on`: the rank's worker gets this signal before the call that is replaced."""

    def value(before: Any) -> Any:
        def after_signal(*args: Any) -> Any:
            os.kill(worker(before.__self__.store), number)
            return before(*args)

        return after_signal

    return value


def _forgets(page: int) -> Callable[[Any], Any]:
    """A value for `only_on`: the fleet has lost the rank's object of this page before the call that is replaced."""

    def value(before: Any) -> Any:
        def after_loss(name: str, keys: bytes, *more: Any) -> Any:
            tier = before.__self__
            (space,) = tier.pool(name)._ids
            lost = tier.store.fleet.tier.wire(tier.store._parts.spaces[space]).names(keys)[page]
            assert tier.store.fleet.tier.link.ask("remove", [lost], time.monotonic() + 10) == [1]
            return before(name, keys, *more)

        return after_loss

    return value


LOOKUP = (lambda rank: rank.backend._tier, "locate")
GET = (lambda rank: rank.backend._tier, "get")


def test_a_rank_whose_fleet_is_slow_or_dies_takes_the_others_along_and_nobody_waits_for_ever(
    fleet: Fleet, disk: Path
) -> None:
    def awake(rank: Rank) -> bool:
        if rank.number:
            os.kill(worker(_store(rank)), signal.SIGCONT)
        return _heal(rank)

    def master(number: int) -> Case:
        def tell(rank: Rank) -> None:
            torch.distributed.barrier()
            if not rank.number:
                os.kill(fleet.master.process.pid, number)
            torch.distributed.barrier()

        return tell

    stops_before_lookup = only_on(1, *LOOKUP, _signalled(signal.SIGSTOP))(_ask)
    stops_before_get = only_on(1, *GET, _signalled(signal.SIGSTOP))(_ask)
    dies_before_get = only_on(0, *GET, _signalled(signal.SIGKILL))(_ask)
    lost = only_on(1, *LOOKUP, _forgets(5))(_ask)
    cases: list[tuple[Case, list[Any]]] = [
        (_joined(fleet, lambda _: disk / "one"), ["", ""]),
        (_compute, [PAGES, PAGES]),
        (_joined(fleet, lambda _: disk / "two"), ["", ""]),
        (_ask, ALL_OF_IT),
        (stops_before_lookup, NONE_OF_IT),
        (awake, [True, True]),
        (_ask, ALL_OF_IT),
        (dies_before_get, NONE_OF_IT),
        (_heal, [True, True]),
        (_ask, ALL_OF_IT),
        (stops_before_get, NONE_OF_IT),
        (_heal, [True, True]),  # nobody woke it: it was killed, and another one came
        (_ask, ALL_OF_IT),
        (master(signal.SIGSTOP), [None, None]),
        (_ask, NONE_OF_IT),
        (master(signal.SIGCONT), [None, None]),
        (_heal, [True, True]),
        (_ask, ALL_OF_IT),
        (lost, [5 * PAGE] * 2),
        (_ask, [5 * PAGE] * 2),
    ]
    answers = on_ranks(built_in_model(), 2, *(case for case, _ in cases), tp_size=2)
    assert answers == [wanted for _, wanted in cases]


def _kept_by(fleet: Fleet) -> int:
    """Objects that the master knows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{fleet.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("master_key_count ")]
    return int(float(line.split()[1]))


def test_replicas_of_one_store_are_published_once_and_restored_by_both(fleet: Fleet, disk: Path) -> None:
    one, two = (_joined(fleet, lambda _, name=name: disk / name) for name in ("one", "two"))
    answers = on_ranks(built_in_model(), 2, one, _compute, two, _ask, mla=True, tp_size=2)
    assert answers == [["", ""], [PAGES, 0], ["", ""], ALL_OF_IT]
    assert _kept_by(fleet) == PAGES


def test_two_nodes_of_one_group_publish_replicas_once_and_wait_for_no_fleet_of_the_other(
    fleet: Fleet, disk: Path
) -> None:
    """Each node has a store of its own; the second one loses its drive, and has what its fleet gives."""
    first = _joined(fleet, lambda rank: disk / f"node-{rank.number}")
    again = _joined(fleet, lambda rank: disk / ("new" if rank.number else "node-0"))
    stops_before_get = only_on(1, *GET, _signalled(signal.SIGSTOP))(_ask)
    cases = [first, _compute, _ask, again, _ask, stops_before_get, _heal, _ask]
    joined, published, *answers = on_ranks(built_in_model(), 2, *cases, mla=True, tp_size=2)
    assert joined == ["", ""]
    assert sum(published) >= PAGES
    assert answers == [ALL_OF_IT, ["", ""], ALL_OF_IT, NONE_OF_IT, [True, True], ALL_OF_IT]
    assert _kept_by(fleet) == PAGES
