"""Reading ahead: in the order of the queue, within bounded memory, and nothing kept of what nobody will ask for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from prometheus_client import CollectorRegistry

from tests.store import kit
from tests.store.kit import TENSORS, Weather, eventually, open_store
from tutti_sglang.integration.direct.preload import Preloader, Waiting
from tutti_sglang.integration.direct.room import Place, Room
from tutti_sglang.integration.pools import PoolView
from tutti_sglang.integration.stored import StoredPool
from tutti_sglang.layout import Order, PageMap
from tutti_sglang.memory import view
from tutti_sglang.metrics import Metrics
from tutti_sglang.testing.faults import EVERY_BLOCK, READS, Fault, FaultPlan

PAGE_BYTES = 28 << 10
"""A page of TENSORS in the room, at most."""


def names(*numbers: int) -> list[str]:
    return [kit.keys(number).hex() for number in numbers]


class Reads:
    """A store with pages 0..39 and a preloader with a room for `pages` of them."""

    def __init__(self, folder: Path, pages: int) -> None:
        self.weather = Weather()
        self.store = open_store(folder, seam=self.weather, max_size=16 * kit.MIB)
        self.namespace = kit.namespace()
        page_map = PageMap(Order.LAYER, (0,) * len(TENSORS), (0,) * len(TENSORS), TENSORS)
        view = PoolView((page_map,), "bfloat16", 16, 0, (0, 2), 0, True, False, ())
        self.pool = StoredPool(self.store, view, (self.namespace,))
        kit.store_pages(self.store, self.store.attach(self.namespace), *range(40))
        self.metrics = Metrics(CollectorRegistry())
        self.room = Room(pages * PAGE_BYTES, self.metrics)
        self.faults: list[Exception] = []
        self.preloader = Preloader(self.room, lambda _: self.pool, self.metrics, self.faults.append)
        self.room.freed = self.preloader.wake

    def want(self, rid: str, *numbers: int) -> None:
        self.preloader.want(rid, names(*numbers), {"kv": names(*numbers)})

    def of(self, rid: str) -> Waiting:
        found = self.preloader.find(rid)
        assert found
        return found

    def complete(self, *rids: str) -> bool:
        return eventually(lambda: all(self.of(rid).complete for rid in rids))

    def holds(self, place: Place, number: int) -> bool:
        got = [bytes(view(int(at), size)) for at, size in zip(place.row, TENSORS, strict=True)]
        return b"".join(got) == kit.content(number, sum(TENSORS)).tobytes()

    def close(self) -> None:
        self.preloader.close()
        assert self.room.used == 0
        assert not self.faults
        assert self.store.close()


@pytest.fixture
def reads(tmp_path: Path) -> Iterator[Callable[[int], Reads]]:
    made: list[Reads] = []

    def make(pages: int = 64) -> Reads:
        made.append(Reads(tmp_path / "drive", pages))
        return made[-1]

    yield make
    for one in made:
        one.weather.plan = None
        one.close()


def test_what_is_claimed_is_what_was_stored_and_the_rest_goes_back(reads: Any) -> None:
    one = reads()
    one.want("a", 0, 1, 2, 3)
    one.want("b", 4, 99, 5)
    assert one.complete("a", "b")
    claimed = one.preloader.claim("a")
    places = claimed.staged["kv"]
    assert all(one.holds(places[name], number) for number, name in enumerate(names(0, 1, 2, 3)))
    assert names(4)[0] in one.of("b").staged["kv"]
    assert names(99)[0] not in one.of("b").staged["kv"]
    one.preloader.give_back(claimed)
    one.preloader.order(["c"])  # b left the queue
    assert one.preloader.find("b") is None
    assert one.room.used == 0


def test_reads_go_in_the_order_of_the_queue(reads: Any) -> None:
    one = reads()
    first: list[str] = []
    original = one.pool.read

    def read(keys: bytes, *rest: Any) -> Any:
        first.append(keys[:32].hex())
        return original(keys, *rest)

    one.pool.read = read
    with one.preloader._changed:  # nothing starts before all have come and were reordered
        for rid, number in (("a", 0), ("b", 10), ("c", 20)):
            one.want(rid, number)
        one.preloader.order(["c", "a", "b"])
    assert one.complete("a", "b", "c")
    assert first == names(20, 0, 10)


def test_a_prefix_larger_than_the_memory_is_staged_as_far_as_it_goes(reads: Any) -> None:
    one = reads(8)
    one.want("a", *range(30))
    assert one.complete("a")
    assert one.of("a").truncated
    staged = list(one.of("a").staged["kv"])
    assert 4 <= len(staged) <= 8
    assert staged == names(*range(len(staged))), "the head of the prefix"
    assert one.room.used <= one.room.size
    one.want("b", 30)
    assert not one.of("b").complete, "no room before a is admitted"
    claimed = one.preloader.claim("a")
    one.preloader.give_back(claimed)
    assert one.complete("b")


def test_the_head_of_the_queue_takes_memory_from_its_end(reads: Any) -> None:
    one = reads(8)
    one.want("tail", *range(6))
    assert one.complete("tail")
    one.want("head", *range(10, 16))
    one.preloader.order(["head", "tail"])

    def admitted() -> bool:
        one.preloader.make_room()
        return one.of("head").complete

    assert eventually(admitted)
    assert len(one.of("head").staged["kv"]) == 6
    assert not one.of("tail").complete
    assert one.metrics.value("tutti_preload_objects", outcome="dropped") == 6
    one.preloader.forget("head")
    assert one.complete("tail"), "it is read again"
    assert len(one.of("tail").staged["kv"]) == 6


def test_an_abort_in_the_middle_of_a_read_leaves_nothing(reads: Any) -> None:
    one = reads()
    one.weather.plan = FaultPlan({Fault.LATE: EVERY_BLOCK}, operations=READS, delay=0.02)
    for round_ in range(5):
        one.want(f"r{round_}", *range(20))
        assert eventually(lambda: one.weather.stalled > 0 or one.room.used > 0)
        one.preloader.forget(f"r{round_}")
    one.weather.plan = None
    one.preloader.clear()
    assert one.room.used == 0


def test_a_failing_drive_makes_a_request_ready_with_what_came(reads: Any) -> None:
    one = reads()
    one.weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK // 50}, seed=3, operations=READS)
    one.want("a", *range(40))
    assert one.complete("a")
    for name, place in one.of("a").staged.get("kv", {}).items():
        assert one.holds(place, int(name, 16))


def test_the_plan_of_640k_tokens_needs_no_more_than_the_room(reads: Any) -> None:
    one = reads(64)
    pages = 640 * 1024 // 64
    cut = one.preloader._pieces({"kv": [f"{number:064x}" for number in range(pages)]})
    assert sum(len(keys) for _, keys in cut) == pages
    assert max(len(keys) for _, keys in cut) * sum(TENSORS) <= one.room.size // 4
    one.want("a", *range(40), *range(100, 100 + pages - 40))
    assert one.complete("a")
    assert one.room.used <= one.room.size


def test_a_room_gives_every_byte_once_and_takes_it_back(tmp_path: Path) -> None:
    room = Room(1 << 20, Metrics(CollectorRegistry()))
    rng = np.random.default_rng(1)
    held: list[Place] = []
    for _ in range(300):
        span = room.take(int(rng.integers(1, 8)), TENSORS)
        if span is not None:
            assert span.rows.min() >= room.address
            assert span.rows.max() + max(TENSORS) <= room.address + room.size
            held += [Place(span, index) for index in range(len(span.rows))]
        starts = np.sort(np.concatenate([place.row[:1] for place in held])) if held else np.zeros(0)
        assert (np.diff(starts) >= sum(TENSORS)).all(), "two pages share bytes"
        rng.shuffle(held)
        room.give(held[: len(held) // 2 if span else len(held)])
        held = held[len(held) // 2 :] if span else []
    room.give(held)
    assert room.used == 0
