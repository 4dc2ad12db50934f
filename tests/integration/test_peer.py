"""Both paths in a fleet: pages that another node has stored are found, loaded byte for byte, and kept."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from tests.integration import linkers
from tests.integration.backends import Backends
from tests.integration.host_pools import fill, mha_pool, slots
from tests.integration.linkers import Request, admitted, content, forward, keys, mha, offload, same
from tests.store.kit import eventually
from tests.store.peer.conftest import Files, files
from tutti_sglang.store import ObjectStore

__all__ = ["files"]

PAGES = [5, 0, 16, 3]

Open = Callable[..., Any]


@pytest.fixture
def nodes(disk: Path, files: Files) -> Iterator[Open]:
    """Backends on the store of a node, whose workers have joined the fleet."""
    made: list[Backends] = []

    def open_on(node: str, pool: Any, **more: Any) -> Any:
        made.append(Backends(disk / node))
        peer = msgspec.to_builtins(files.peer(**more.pop("peer", {})))
        backend = made[-1].open(pool, extra={"peer": peer, "break_even": "off"}, **more)
        assert eventually(lambda: _serves(backend._tier.store))
        return backend

    yield open_on
    for each in made:
        each.close()


def _serves(store: ObjectStore) -> bool:
    assert store.fleet
    return store.fleet.tier.serves


def _shared(store: ObjectStore) -> bool:
    assert store.fleet
    return store.fleet.drain(20)


def _content(pool: Any, pages: list[int]) -> list[torch.Tensor]:
    return [pool.get_data_page(page * pool.page_size).view(torch.uint8).clone() for page in pages]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_pages_of_another_node_fill_host_pages_and_are_kept(nodes: Open, files: Files) -> None:
    pool, other = mha_pool(), mha_pool()
    fill(pool, 1)
    fill(other, 2)
    one, two = nodes("one", pool), nodes("two", other)
    assert two.batch_exists(keys(4)) == 0
    assert one.batch_set_v1(keys(4), slots(pool, PAGES)) == [True] * 4
    assert _shared(one._tier.store)
    assert two.batch_exists(keys(5)) == 4
    kv = [PoolTransfer(name=PoolName.KV, keys=keys(5))]
    assert two.batch_exists_v2(keys(5), kv).kv_hit_pages == 4
    assert two.batch_get_v1(keys(5), slots(other, [1, 2, 3, 4, 6])) == [True] * 4 + [False]
    assert _same(_content(other, [1, 2, 3, 4]), _content(pool, PAGES))
    assert _shared(two._tier.store)
    files.mood("down")
    assert two.batch_exists(keys(5)) == 4, "it is here now"


def test_ranks_whose_fleets_differ_answer_what_they_have_and_the_least_counts(nodes: Open, files: Files) -> None:
    """One rank's fleet is slow: SGLang goes on with the minimum of what all ranks say."""
    pool = mha_pool()
    fill(pool, 1)
    writer = nodes("one", pool)
    assert all(writer.batch_set_v1(keys(4), slots(pool, PAGES)))
    assert _shared(writer._tier.store)
    quick, slow = nodes("two", mha_pool()), nodes("three", mha_pool())
    assert quick.batch_exists(keys(4)) == 4
    files.mood("slow")
    answers = [4, slow.batch_exists(keys(4))]
    assert min(answers) == 0
    files.mood("well")


def test_what_has_no_lasting_identity_is_not_shared(nodes: Open, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti_sglang.integration.tier.is_repeatable", lambda _: False)
    pool = mha_pool()
    fill(pool, 1)
    backend = nodes("one", pool)
    assert all(backend.batch_set_v1(keys(4), slots(pool, PAGES)))
    assert _shared(backend._tier.store)
    assert not files.objects


@pytest.fixture
def linked(disk: Path, files: Files) -> Iterator[Open]:
    """Linkers on the store of a node, whose workers have joined the fleet."""
    made = []

    def open_on(node: str, pool: Any, **more: Any) -> Any:
        made.append(linkers.make(pool, disk / node, peer=msgspec.to_builtins(files.peer()), **more))
        assert eventually(lambda: _serves(made[-1]._tier.store))
        return made[-1]

    yield open_on
    for each in made:
        each.close()


def test_pages_of_another_node_are_loaded_into_device_slots(linked: Open, files: Files) -> None:
    pool = mha()
    linkers.fill(pool, 1)
    source, target = [7, 3, 20, 21], [9, 33, 2, 40]
    want = content(pool, source)
    one, two = linked("one", pool), linked("two", pool)
    assert offload(one, keys(4), source)
    assert _shared(one._tier.store)
    request = Request(two, "r", keys(6)).arrive()
    assert admitted(two, "r")
    assert request.lookup() == 4
    assert request.load(kv=target)
    assert forward(two)
    assert same(content(pool, target), want)
    # A fleet that hangs holds a request up for its time, and no scheduler thread.
    files.mood("hang")
    absent = Request(two, "s", keys(4, 100)).arrive()
    assert admitted(two, "s")
    assert absent.lookup() == 0
    files.mood("well")


def test_a_request_without_room_to_read_ahead_loads_what_is_here(linked: Open) -> None:
    """Layers are read from the own drives alone: what only the fleet has is not claimed there."""
    pool = mha()
    linkers.fill(pool, 1)
    one, two = (linked(node, pool, preload=0) for node in ("one", "two"))
    assert offload(one, keys(4), [7, 3, 20, 21])
    assert _shared(one._tier.store)
    assert Request(two, "r", keys(4)).lookup() == 0
    assert Request(one, "r", keys(4)).lookup() == 4
