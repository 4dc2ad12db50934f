"""The linker on two ranks with a real gloo group: open together or not at all, and what one lacks nobody loads."""

import contextlib
import importlib
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.gloo import Rank, on_ranks, replaced
from tests.integration.linkers import Request, admitted, content, fill, forward, keys, make, mha, offload, same
from tests.store.kit import eventually
from tests.store.peer.fleet_kit import Fleet, fleet_of, serves, worker
from tutti_sglang.errors import RankError
from tutti_sglang.integration.cpu_model import built_in_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _scheduler() -> None:
    """Once: this import takes half a minute on a small machine, and the ranks fork from here."""
    importlib.import_module("sglang.srt.managers.scheduler")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(tmp_path / "fleet") as fleet:
        yield fleet


def _linker(disk: Path, **extra: Any) -> Any:
    pool = mha()
    fill(pool, 1 + torch.distributed.get_rank())
    return make(pool, disk / "store", group=torch.distributed.new_group(backend="gloo"), **extra), pool


def test_ranks_that_mean_other_models_do_not_start(disk: Path) -> None:
    def other_models(rank: Rank) -> str:
        with pytest.raises(RankError) as caught:
            _linker(disk, model_id=f"model {rank.number}")
        return str(caught.value)

    (said,) = on_ranks(built_in_model(), 2, other_models, tp_size=2)
    assert said[0] == said[1]
    assert "Rank 1 has another" in said[0]


def test_a_rank_that_cannot_start_is_named_by_all(disk: Path) -> None:
    def no_room(rank: Rank) -> str:
        with pytest.raises(Exception) as caught:
            _linker(disk / str(rank.number), **({"max_size": "1KiB"} if rank.number else {}))
        return f"{type(caught.value).__name__}: {caught.value}"

    (said,) = on_ranks(built_in_model(), 2, no_room, tp_size=2)
    assert said[0].startswith("RankError: Rank 1 cannot attach")


def test_each_rank_loads_its_own_half_and_what_one_lost_nobody_loads(disk: Path) -> None:
    def restore(rank: Rank) -> list[bool]:
        linker, pool = _linker(disk)
        want = content(pool, [3, 4, 5])
        assert offload(linker, keys(3), [3, 4, 5])
        assert linker._tier.store.drain(8)
        fill(pool, 9)
        one = Request(linker, "one", keys(3)).arrive()
        assert admitted(linker, "one")
        assert one.lookup() == 3
        assert one.load(kv=[10, 11, 12])
        assert forward(linker)
        came = same(content(pool, [10, 11, 12]), want)
        two = Request(linker, "two", keys(3)).arrive()
        assert admitted(linker, "two")
        assert two.lookup() == 3
        if rank.number:
            linker._preloader.forget("two")
            linker._tier.clear()
        refused = not two.load(kv=[20, 21, 22])
        linker.close()
        return [came, refused]

    (answers,) = on_ranks(built_in_model(), 2, restore, tp_size=2)
    assert answers == [[True, True], [True, True]]


def test_ranks_wait_together_for_what_the_fleet_sends_and_go_on_when_it_hangs_for_one(disk: Path, fleet: Fleet) -> None:
    peer = msgspec.to_builtins(fleet.peer(keep=False))

    def open_on(node: str) -> Any:
        linker, pool = _linker(disk / node, peer=peer, break_even="off")
        assert eventually(lambda: serves(linker._tier.store), 90)
        torch.distributed.barrier()
        return linker, pool

    def one_stores(rank: Rank) -> bool:
        linker, pool = open_on("one")
        rank.want = content(pool, [3, 4, 5])
        assert offload(linker, keys(3), [3, 4, 5])
        assert linker._tier.store.drain(30)
        done: bool = linker._tier.store.fleet.drain(30)
        linker.close()
        return done

    def other_loads(rank: Rank) -> bool:
        rank.linker, rank.pool = open_on("two")
        return _arrive_and_load(rank, "well")

    def one_hangs(rank: Rank) -> int:
        """Its engine stops between the lookup and the get: the others wait with it, and no longer."""
        store = rank.linker._tier.store
        if rank.number:
            stopped, get = worker(store), store.get
            with replaced(store, "get", lambda *each: (os.kill(stopped, signal.SIGSTOP), get(*each))[1]):
                request = Request(rank.linker, "hangs", keys(3)).arrive()
                assert admitted(rank.linker, "hangs")
        else:
            request = Request(rank.linker, "hangs", keys(3)).arrive()
            assert admitted(rank.linker, "hangs")
        found = torch.tensor(request.lookup())
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)  # as SGLang's tree does
        return int(found)

    def it_heals(rank: Rank) -> bool:
        assert eventually(lambda: serves(rank.linker._tier.store), 90)
        torch.distributed.barrier()
        loaded = _arrive_and_load(rank, "again")
        rank.linker.close()
        return loaded

    answers = on_ranks(built_in_model(), 2, one_stores, other_loads, one_hangs, it_heals, tp_size=2)
    assert answers == [[True, True], [True, True], [0, 0], [True, True]]


def _arrive_and_load(rank: Any, rid: str) -> bool:
    fill(rank.pool, 9)
    request = Request(rank.linker, rid, keys(3)).arrive()
    assert admitted(rank.linker, rid)
    assert request.lookup() == 3
    assert request.load(kv=[10, 11, 12])
    return forward(rank.linker) and same(content(rank.pool, [10, 11, 12]), rank.want)


def test_ranks_of_attention_dp_load_what_any_of_them_stored_and_wait_for_no_other(disk: Path) -> None:
    """Each is a whole model with a queue of its own: SGLang compares what can be restored within attention TP only."""

    def open_one(rank: Rank) -> Any:
        pool = mha()
        fill(pool, 1)  # what both would compute
        parallel = rank.parallel
        group = parallel.attn_tp_group.cpu_group
        assert (parallel.attn_dp_size, torch.distributed.get_world_size(group=group)) == (2, 1)
        return make(pool, disk / "store", group=group), pool

    def one_stores(rank: Rank) -> bool:
        rank.linker, rank.pool = open_one(rank)
        rank.want = content(rank.pool, [3, 4, 5])
        done = rank.number or (offload(rank.linker, keys(3), [3, 4, 5]) and rank.linker._tier.store.drain(8))
        torch.distributed.barrier()
        return bool(done)

    def the_other_loads(rank: Rank) -> bool:
        fill(rank.pool, 9)
        if not rank.number:
            return True  # it takes part in nothing
        request = Request(rank.linker, "alone", keys(3)).arrive()
        assert admitted(rank.linker, "alone")
        assert request.lookup() == 3
        assert request.load(kv=[10, 11, 12])
        return forward(rank.linker) and same(content(rank.pool, [10, 11, 12]), rank.want)

    def both_store(rank: Rank) -> int:
        assert offload(rank.linker, keys(4, 50), [20, 21, 22, 23])
        assert rank.linker._tier.store.drain(8)
        torch.distributed.barrier()
        with contextlib.closing(sqlite3.connect(f"file:{disk / 'store' / 'index.db'}?mode=ro", uri=True)) as index:
            objects = int(index.execute("SELECT count(*) FROM objects").fetchone()[0])
        torch.distributed.barrier()
        rank.linker.close()
        return objects

    cases = (one_stores, the_other_loads, both_store)
    answers = on_ranks(built_in_model(), 2, *cases, tp_size=2, dp_size=2, enable_dp_attention=True)
    assert answers[:2] == [[True, True], [True, True]]
    assert answers[2] == [7, 7], "stored once, whoever wrote it"
