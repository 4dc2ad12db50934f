"""The backend class on a real store with real host pools: what SGLang's threads ask in every shape, and get."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.observability.metrics_collector import StorageMetrics

from tests.integration.backends import Backends
from tests.integration.host_pools import fill, mha_pool, mla_pool, slots, storage
from tests.store.kit import Weather, eventually
from tutti_sglang.config import Config
from tutti_sglang.engine.threads import ThreadsEngine
from tutti_sglang.engine.uring import UringEngine, uring_refused
from tutti_sglang.errors import CapacityError, ConfigError, ForeignStoreError, StoreError, UnsupportedError
from tutti_sglang.integration import hicache, tier
from tutti_sglang.integration import served as served_module
from tutti_sglang.integration.hicache import TuttiHiCacheStorage
from tutti_sglang.integration.identity import Identity
from tutti_sglang.integration.live import live_backends
from tutti_sglang.integration.served import Served
from tutti_sglang.kernels import native
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import ObjectStore
from tutti_sglang.testing.faults import EVERY_BLOCK, WRITES, Fault, FaultPlan

Open = Callable[..., TuttiHiCacheStorage]
PAGES = [5, 0, 16, 3]


def keys(count: int, start: int = 0) -> list[str]:
    return [hashlib.sha256(str(n).encode()).hexdigest() for n in range(start, start + count)]


@pytest.fixture
def opened(disk: Path) -> Iterator[Open]:
    """Backends on one store, as the factory makes them; closed at the end."""
    backends = Backends(disk / "store")
    yield backends.open
    backends.close()


def _contents(pool: Any, pages: list[int]) -> list[torch.Tensor]:
    return [pool.get_data_page(page * pool.page_size).view(torch.uint8).clone() for page in pages]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_all_constructor_shapes(opened: Open, disk: Path) -> None:
    pool = mha_pool()
    settings = {"storage_dirs": [str(disk / "store")], "max_size": "16MiB", "segment_size": "2MiB", "min_free_space": 1}
    for arguments in ((), (None,), ({},)):
        config = storage(extra_config=dict(settings))
        backend = TuttiHiCacheStorage(config, *arguments)
        assert config.extra_config["interface_v1"] == 1, "the dynamic route is zero-copy by itself"
        assert backend.batch_exists(keys(2)) == 0
        assert backend.batch_get_v1(keys(1), slots(pool, [0])) == [False]
        backend.register_mem_pool_host(pool)
        backend.close()
    assert opened(pool).batch_exists(keys(2)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head", "mla"])
def test_what_is_set_is_got_after_a_restart(opened: Open, layout: str, page_size: int, dtype: torch.dtype) -> None:
    def make() -> Any:
        return mla_pool("layer_first", page_size, dtype) if layout == "mla" else mha_pool(layout, page_size, dtype)

    pool, mla = make(), layout == "mla"
    fill(pool, 1)
    first = opened(pool, is_mla_model=mla)
    assert first.batch_set_v1(keys(4), slots(pool, PAGES)) == [True] * 4
    assert first.batch_exists(keys(5)) == 4, "served while it is being written"
    first.close()
    other = make()
    fill(other, 2)
    second = opened(other, is_mla_model=mla)
    assert second.batch_exists(keys(5)) == 4
    assert second.batch_get_v1(keys(5), slots(other, [1, 2, 3, 4, 6])) == [True] * 4 + [False]
    assert _equal(_contents(other, [1, 2, 3, 4]), _contents(pool, PAGES))


def test_layer_major_layouts_read_each_other_and_no_other(opened: Open) -> None:
    by_layout = {each: mha_pool(each) for each in ("layer_first", "page_first_direct", "page_first")}
    fill(by_layout["layer_first"], 1)
    writer = opened(by_layout["layer_first"])
    assert all(writer.batch_set_v1(keys(4), slots(by_layout["layer_first"], PAGES)))
    writer.close()
    assert opened(by_layout["page_first"]).batch_exists(keys(4)) == 0
    target = by_layout["page_first_direct"]
    assert opened(target).batch_get_v1(keys(4), slots(target, PAGES)) == [True] * 4
    assert _equal(_contents(target, PAGES), _contents(by_layout["layer_first"], PAGES))


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 4), (4, 2), (4, 1)])
def test_heads_written_at_one_tp_size_are_read_at_another(
    opened: Open, monkeypatch: pytest.MonkeyPatch, writers: int, readers: int
) -> None:
    model = Identity(model="m", weights="w", kv_heads=4)
    monkeypatch.setattr(tier.served, "identity", lambda *_, **__: model)

    def ranks(size: int) -> Iterator[tuple[Any, TuttiHiCacheStorage]]:
        for rank in range(size):
            pool = mha_pool("page_head", heads=4 // size)
            fill(pool, 10 * size + rank)
            yield pool, opened(pool, tp_rank=rank, tp_size=size, tp_lcm_size=4, should_split_heads=size < 4)

    def heads(pools: list[Any], pages: slice) -> torch.Tensor:
        return torch.cat([pool.kv_buffer[:, pages] for pool in pools], dim=2).view(torch.uint8)

    written, read = [], []
    for pool, backend in ranks(writers):
        assert all(backend.batch_set_v1(keys(2), slots(pool, [0, 1])))
        backend.close()
        written.append(pool)
    for pool, backend in ranks(readers):
        assert backend.batch_exists(keys(3)) == 2
        assert backend.batch_get_v1(keys(3), slots(pool, [4, 5, 6])) == [True, True, False]
        read.append(pool)
    assert torch.equal(heads(read, slice(4, 6)), heads(written, slice(0, 2)))


def test_a_hole_ends_the_prefix_and_nothing_else(opened: Open) -> None:
    pool = mha_pool()
    fill(pool, 1)
    backend = opened(pool)
    names = keys(6)
    backend.batch_set_v1([names[n] for n in (0, 1, 3, 4)], slots(pool, [0, 1, 3, 4]))
    assert backend.batch_exists(names) == 2
    assert backend.batch_get_v1(names, slots(pool, [6, 7, 8, 9, 10, 11])) == [True, True, False, True, True, False]
    assert _equal(_contents(pool, [6, 7, 9, 10]), _contents(pool, [0, 1, 3, 4]))
    assert backend.batch_exists(keys(8192)) == 2
    assert backend.batch_exists([]) == 0


def test_a_page_is_stored_once(opened: Open) -> None:
    pool = mha_pool()
    backend = opened(pool)
    threads = [
        threading.Thread(target=lambda: [backend.batch_set_v1(keys(4), slots(pool, PAGES)) for _ in range(10)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert backend.batch_set_v1(keys(4), slots(pool, PAGES)) == [True] * 4
    backend.flushed()
    assert backend._tier.store.stats().objects <= 4


def test_ranks_keep_their_own_shards_and_share_replicas(opened: Open) -> None:
    shards = [mha_pool(), mha_pool()]
    ranks = [opened(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(shards)]
    for rank, pool in enumerate(shards):
        fill(pool, rank)
        assert all(ranks[rank].batch_set_v1(keys(2), slots(pool, [0, 1])))
    for rank, pool in enumerate(shards):
        assert ranks[rank].batch_get_v1(keys(2), slots(pool, [4, 5])) == [True, True]
        assert _equal(_contents(pool, [4, 5]), _contents(pool, [0, 1]))
    replicas = [mla_pool(), mla_pool()]
    writer, reader = [opened(pool, tp_rank=rank, tp_size=2, is_mla_model=True) for rank, pool in enumerate(replicas)]
    assert reader.batch_set_v1(keys(2), slots(replicas[1], [0, 1])) == [False, False], "another rank writes"
    assert writer.batch_set_v1(keys(2), slots(replicas[0], [0, 1])) == [True, True]
    writer.flushed()
    assert reader.batch_set_v1(keys(2), slots(replicas[1], [0, 1])) == [True, True]
    assert reader.batch_get_v1(keys(2), slots(replicas[1], [4, 5])) == [True, True]


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    """What is wrong with the drives of the stores that are opened from now on."""
    found = Weather()

    def on_bad_drives(config: Config, *, metrics: Metrics) -> ObjectStore:
        engine = ThreadsEngine(config.segment_size, 4, config.max_io, found)
        return ObjectStore(config, metrics=metrics, engine=engine)

    monkeypatch.setattr(tier, "ObjectStore", on_bad_drives)
    return found


def test_a_page_that_cannot_be_written_does_not_take_its_batch_along(opened: Open, weather: Weather) -> None:
    pool = mha_pool()
    fill(pool, 1)
    backend = opened(pool)
    weather.plan = FaultPlan({Fault.ERROR: EVERY_BLOCK // 20}, operations=WRITES)
    assert backend.batch_set_v1(keys(8), slots(pool, list(range(8)))) == [True] * 8
    backend.flushed()
    weather.plan = None
    assert eventually(lambda: backend._tier.store.stats().drives_in_service == 1)
    got = backend.batch_get_v1(keys(8), slots(pool, list(range(8, 16))))
    assert 0 < sum(got) < 8
    there = [page for page, came in enumerate(got) if came]
    assert _equal(_contents(pool, [8 + page for page in there]), _contents(pool, there))
    assert backend.batch_set_v1(keys(8), slots(pool, list(range(8)))) == [True] * 8, "and can be offered again"
    backend.flushed()
    assert all(backend.batch_get_v1(keys(8), slots(pool, list(range(8, 16)))))


def test_drives_that_do_not_keep_up_cost_one_wait_and_not_one_each(
    opened: Open, weather: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each put that waits holds the host rows of all that SGLang has queued behind it."""
    monkeypatch.setattr(hicache, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(hicache, "CROWDED_SECONDS", 0.01)
    pool = mha_pool()
    backend = opened(pool, extra={"staging_size": "4MiB"})
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES)
    waits, turn = [], 0
    while len(waits) < 4:
        patience = backend._patience() - time.monotonic()
        done = backend.batch_set_v1(keys(17, 17 * turn), slots(pool, list(range(17))))
        turn += 1
        if not all(done):
            waits.append(patience > 0.01)
            assert done == sorted(done, reverse=True), "what there was room for is kept"
    assert waits == [True, False, False, False]
    assert all(backend.batch_set_v1(keys(17), slots(pool, list(range(17))))), "what is there needs no room"
    weather.plan.gate.open()
    backend.flushed()
    assert all(backend.batch_set_v1(keys(17, 17 * turn), slots(pool, list(range(17)))))
    assert backend._patience() - time.monotonic() > 0.01


def test_indices_that_change_during_the_call_do_not_matter(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha_pool()
    fill(pool, 1)
    backend = opened(pool)
    given = slots(pool, PAGES)
    put = backend._tier.store.put

    def later(*args: Any, **kwargs: Any) -> Any:
        given.zero_()
        return put(*args, **kwargs)

    monkeypatch.setattr(backend._tier.store, "put", later)
    assert all(backend.batch_set_v1(keys(4), given))
    assert backend.batch_get_v1(keys(4), slots(pool, [8, 9, 10, 11])) == [True] * 4
    assert _equal(_contents(pool, [8, 9, 10, 11]), _contents(pool, PAGES))


def test_slots_that_make_no_pages_are_refused_whole(opened: Open) -> None:
    pool = mha_pool()
    backend = opened(pool)
    assert backend.batch_set_v1(keys(2), slots(pool, [0, 1]) + 1) == [False, False]
    assert backend.batch_set_v1(keys(2), slots(pool, [0])) == [False, False]
    assert backend.batch_set_v1(keys(1), slots(pool, [99])) == [False]
    assert backend.batch_exists(keys(2)) == 0


EVERY_CALL: list[tuple[Callable[[TuttiHiCacheStorage, Any], Any], Any]] = [
    (lambda b, p: b.batch_exists(keys(2)), 0),
    (lambda b, p: b.batch_exists(keys(2), extra_info=None), 0),
    (lambda b, p: b.batch_get_v1(keys(2), slots(p, [0, 1])), [False] * 2),
    (lambda b, p: b.batch_set_v1(keys=keys(2), host_indices=slots(p, [0, 1])), [False] * 2),
    (lambda b, p: b.batch_exists_v2(keys(2), []).kv_hit_pages, 0),
    (lambda b, p: b.batch_get_v2([PoolTransfer(PoolName.KV, slots(p, [0]), keys=keys(1))]), {"kv": [False]}),
    (lambda b, p: b.batch_set_v2([PoolTransfer(PoolName.KV, slots(p, [0]), keys=keys(1))]), {"kv": [False]}),
    (lambda b, p: b.exists(keys(1)[0]), False),
    (lambda b, p: b.get(keys(1)[0], torch.zeros(4)), None),
    (lambda b, p: b.set(keys(1)[0], torch.zeros(4)), False),
    (lambda b, p: b.batch_get(keys(2), [torch.zeros(4)] * 2), [None] * 2),
    (lambda b, p: b.batch_set(keys(2), [torch.zeros(4)] * 2), False),
    (lambda b, p: b.clear(), False),
]


@pytest.mark.parametrize("error", [OSError(5, "EIO"), RuntimeError("bug"), MemoryError()], ids=repr)
def test_no_exception_leaves_the_class(
    opened: Open, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = mha_pool()
    backend = opened(pool)
    backend.set("known", torch.zeros(4))

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    for name in ("lookup", "get", "put", "clear"):
        monkeypatch.setattr(backend._tier.store, name, fail)
    for call, answer in EVERY_CALL:
        assert call(backend, pool) == answer
    assert all(record.name.startswith("tutti_sglang") for record in caplog.records if record.levelno >= logging.ERROR)


def test_after_close_every_call_is_a_miss(opened: Open) -> None:
    pool = mha_pool()
    backend = opened(pool)
    assert backend in live_backends()
    assert all(backend.batch_set_v1(keys(2), slots(pool, [0, 1])))
    backend.close()
    backend.close()
    assert backend not in live_backends()
    for call, answer in EVERY_CALL:
        assert call(backend, pool) == answer
    assert isinstance(backend.get_stats(), StorageMetrics)
    assert opened(pool).batch_exists(keys(2)) == 2, "what was accepted is stored by close"


def test_close_waits_for_calls_and_leaves_rows_alone(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha_pool()
    fill(pool, 1)
    backend = opened(pool)
    assert all(backend.batch_set_v1(keys(4), slots(pool, PAGES)))
    inside, leave, answers = threading.Event(), threading.Event(), []
    get = backend._tier.store.get

    def slow(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        leave.wait(60)
        return get(*args, **kwargs)

    monkeypatch.setattr(backend._tier.store, "get", slow)
    reader = threading.Thread(target=lambda: answers.append(backend.batch_get_v1(keys(4), slots(pool, [6, 7, 8, 9]))))
    reader.start()
    assert inside.wait(60)
    closer = threading.Thread(target=backend.close)
    closer.start()
    leave.set()
    closer.join(60)
    reader.join(60)
    assert answers == [[True] * 4]
    pool.destroy()  # SGLang drops its buffers now; nothing of ours may read or write them any more
    assert not backend.batch_get_v1(keys(1), torch.arange(16))[0]


def test_clear_takes_only_its_own(opened: Open) -> None:
    pool, other = mha_pool(), mha_pool(dtype=torch.bfloat16)
    mine, theirs = opened(pool), opened(other)
    for backend, each in ((mine, pool), (theirs, other)):
        assert all(backend.batch_set_v1(keys(2), slots(each, [0, 1])))
    mine.set("flat", torch.ones(3))
    assert mine.clear()
    assert mine.batch_exists(keys(2)) == 0
    assert not mine.exists("flat")
    assert theirs.batch_exists(keys(2)) == 2


def test_stats_are_drained_and_do_not_grow_unread(opened: Open) -> None:
    pool = mha_pool()
    metered, quiet = opened(pool, enable_storage_metrics=True), opened(pool)
    for backend in (metered, quiet):
        backend.batch_set_v1(keys(2), slots(pool, [0, 1]))
        backend.batch_get_v1(keys(3), slots(pool, [2, 3, 4]))
    assert all(metered.batch_set_v1(keys(3), slots(pool, [0, 1, 2])))
    assert all(metered.batch_set_v1(keys(3), slots(pool, [0, 1, 2])))
    stats = metered.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2, 1], [2]), "of what is there already nothing is written"
    assert stats.backup_bandwidth[0] > 0
    assert stats.prefetch_bandwidth[0] > 0
    assert metered.get_stats() == StorageMetrics()
    assert quiet.get_stats() == StorageMetrics()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64], ids=str)
def test_tensors_of_any_shape_come_back(opened: Open, dtype: torch.dtype) -> None:
    backend = opened()
    values = [torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype) for _ in range(3)]
    values.append(values[0].T)
    values.append(torch.zeros(2, dtype=dtype))
    assert backend.batch_set(keys(5), values)
    assert all(backend.exists(key) for key in keys(5))
    assert backend.batch_exists(keys(6)) == 5
    targets = [torch.zeros(6, 4, dtype=dtype) for _ in range(3)]
    targets.append(torch.zeros(6, 4, dtype=dtype).T)
    got = backend.batch_get(keys(6), [*targets, None, torch.zeros(2, dtype=dtype)])
    for value, target, back in zip(values[:4], targets, got, strict=False):
        assert back is target
        assert torch.equal(back.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
    assert torch.equal(got[4].view(torch.uint8), values[4].view(torch.uint8))
    assert got[5] is None
    assert backend.get(keys(1)[0], torch.zeros(5, dtype=dtype)) is None, "another size is another object"
    assert not backend.set("nothing", None)
    assert not backend.set("empty", torch.zeros(0))


def test_the_generic_route_finds_its_pages_after_a_restart(opened: Open) -> None:
    pool = mha_pool()
    fill(pool, 1)
    first = opened(extra={"interface_v1": 0})
    first.register_mem_pool_host(pool)
    pages = [pool.get_data_page(page * 16) for page in PAGES]
    assert first.batch_set(keys(4), pages)
    first.close()
    second = opened(extra={"interface_v1": 0})
    second.register_mem_pool_host(pool)
    assert second.batch_exists(keys(5)) == 4
    got = second.batch_get(keys(4), [pool.get_dummy_flat_data_page() for _ in range(4)])
    assert _equal([page.view(torch.uint8) for page in got], _contents(pool, PAGES))
    assert opened(pool).batch_exists(keys(4)) == 0, "pages of host rows are other objects"


@pytest.mark.parametrize(
    ("stored", "window", "length"), [((3, 7), 1, 8), ((), 1, 0), ((6, 7), 2, 8), ((7,), 2, 0), (range(10), 3, 10)]
)
def test_a_side_pool_limits_what_can_be_restored(
    opened: Open, stored: tuple[int, ...], window: int, length: int
) -> None:
    pool, side = mha_pool(), mha_pool("page_first", heads=2)
    fill(side, 3)
    backend = opened(pool)
    backend.register_mem_host_pool_v2(side, PoolName.SWA)
    names = keys(10)
    assert all(backend.batch_set_v1(names, slots(pool, list(range(10)))))
    pages = list(stored)
    if pages:
        transfer = PoolTransfer(PoolName.SWA, slots(side, pages), keys=[names[n] for n in pages])
        assert backend.batch_set_v2([transfer]) == {PoolName.SWA: [True] * len(pages)}
    asked = PoolTransfer(PoolName.SWA, keys=names[:window], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    result = backend.batch_exists_v2(names, [asked])
    assert result.kv_hit_pages == length
    assert result.extra_pool_hit_pages == {PoolName.KV: 10} | ({PoolName.SWA: length} if length else {})
    assert (result.restorable_prefix_pages or [0])[-1] == length
    if length:
        back = PoolTransfer(PoolName.SWA, slots(side, [12]), keys=[names[length - 1]])
        assert backend.batch_get_v2([back]) == {"swa": [True]}
        assert _equal(_contents(side, [12]), _contents(side, [length - 1]))


def test_a_pool_that_was_not_registered_restores_nothing(opened: Open) -> None:
    pool = mha_pool()
    backend = opened(pool)
    assert all(backend.batch_set_v1(keys(2), slots(pool, [0, 1])))
    result = backend.batch_exists_v2(keys(2), [PoolTransfer(PoolName.MAMBA, keys=keys(1))])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    transfers = [PoolTransfer(PoolName.MAMBA, torch.arange(1), keys=keys(1)), PoolTransfer(PoolName.KV, keys=keys(1))]
    assert backend.batch_get_v2(transfers) == {"mamba": [False], "kv": [False]}


class _UnknownPool:
    layout = "page_first"


def test_what_cannot_be_served_is_refused_before_files_are_made(opened: Open, disk: Path) -> None:
    with pytest.raises(UnsupportedError, match="_UnknownPool"):
        opened(_UnknownPool())
    with pytest.raises(ConfigError, match="storage_dirs"):
        opened(extra={"storage_dir": "/x"})
    with pytest.raises(UnsupportedError, match="direct"):
        opened(extra={"path": "direct"})
    assert not (disk / "store").exists()
    backend = opened()
    with pytest.raises(UnsupportedError, match="_UnknownPool"):
        backend.register_mem_host_pool_v2(_UnknownPool(), PoolName.INDEXER)


def test_a_directory_that_cannot_be_used_says_what_to_do(opened: Open, disk: Path) -> None:
    (disk / "photos").mkdir()
    (disk / "photos" / "one.jpg").write_bytes(b"x")
    with pytest.raises(ForeignStoreError, match="photos"):
        opened(extra={"storage_dirs": [str(disk / "photos")]})
    (disk / "file").write_bytes(b"x")
    with pytest.raises(StoreError, match="file"):
        opened(extra={"storage_dirs": [str(disk / "file")]})
    with pytest.raises(CapacityError, match="min_free_space"):
        opened(mha_pool(), extra={"storage_dirs": [str(disk / "full")], "min_free_space": "900TiB"})


def test_new_weights_find_nothing_of_the_old(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Served()
    monkeypatch.setattr(tier, "served", model)

    def update(backend: TuttiHiCacheStorage) -> None:
        model.change()
        backend.suspend("the weights are being updated")

    pool = mha_pool()
    backend = opened(pool)
    assert all(backend.batch_set_v1(keys(2), slots(pool, [0, 1])))
    backend.flushed()
    update(backend)
    assert backend.batch_exists(keys(2)) == 0
    assert backend.batch_set_v1(keys(1, 5), slots(pool, [0])) == [False], "it may be of the old weights"
    backend.flushed()
    assert backend.batch_exists(keys(2)) == 0
    assert backend.batch_set_v1(keys(2), slots(pool, [0, 1])) == [True, True]
    assert backend.batch_exists(keys(2)) == 2
    update(backend)
    backend.flushed()
    assert backend.batch_exists(keys(2)) == 0
    monkeypatch.setattr(tier, "served", Served())
    assert opened(pool).batch_exists(keys(2)) == 2, "the old weights, after a restart"


def test_replicas_share_their_pages_after_new_weights_too(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [mla_pool(), mla_pool()]
    models = [Served(), Served()]
    launch = "one launch"
    monkeypatch.setattr(served_module, "shared_id", lambda: launch)
    ranks = []
    for rank, pool in enumerate(pools):
        monkeypatch.setattr(tier, "served", models[rank])
        ranks.append(opened(pool, tp_rank=rank, tp_size=2, is_mla_model=True))
    writer, reader = ranks
    assert all(writer.batch_set_v1(keys(2), slots(pools[0], [0, 1])))
    for backend, model in zip(ranks, models, strict=True):
        model.change()
        backend.suspend("the weights are being updated")
        backend.flushed()
    assert [each.batch_exists(keys(2)) for each in ranks] == [0, 0]
    fill(pools[0], 1)
    assert all(writer.batch_set_v1(keys(2), slots(pools[0], [0, 1])))
    writer.flushed()
    assert reader.batch_get_v1(keys(2), slots(pools[1], [4, 5])) == [True, True]
    assert _equal(_contents(pools[1], [4, 5]), _contents(pools[0], [0, 1]))


@pytest.mark.skipif(native.library() is None or bool(uring_refused()), reason="no io_uring here")
def test_after_attaching_the_drives_are_ready_before_any_get(opened: Open) -> None:
    pool = mha_pool()
    first = opened(pool)
    assert all(first.batch_set_v1(keys(4), slots(pool, PAGES)))
    first.close()
    engine = opened(pool)._tier.store._parts.engine
    assert isinstance(engine, UringEngine)
    assert eventually(lambda: engine.registered == 16 << 20), "all of so small a staging is its first piece"
    assert engine.counters.transfers == 0


def test_attach_and_detach_leave_nothing_behind(opened: Open) -> None:
    pool = mha_pool()
    fill(pool, 1)

    def resources() -> tuple[int, list[str]]:
        files = Path("/proc/self/fd").iterdir()
        return threading.active_count(), sorted(os.readlink(file) for file in files if file.is_symlink())

    seen = []
    for turn in range(10):
        backend = opened(pool)
        assert backend.batch_exists(keys(turn + 1)) == turn
        assert backend.batch_set_v1(keys(1, turn), slots(pool, [turn])) == [True]
        backend.close()
        seen.append(resources())
    assert seen[-1] == seen[1]


def test_a_damaged_page_is_a_miss(opened: Open, disk: Path) -> None:
    pool = mha_pool(page_size=64)
    fill(pool, 1)
    backend = opened(pool)
    assert all(backend.batch_set_v1(keys(4), slots(pool, PAGES)))
    backend.close()
    payload = pool.get_data_page(PAGES[1] * 64).view(torch.uint8).numpy().tobytes()[:512]
    for file in (disk / "store" / "segments").iterdir():
        data = file.read_bytes()
        place = data.find(payload)
        if place >= 0:
            with open(file, "r+b") as writable:
                writable.seek(place + 100)
                writable.write(bytes([data[place + 100] ^ 1]))
    assert opened(pool).batch_get_v1(keys(4), slots(pool, [8, 9, 10, 11])) == [True, False, True, True]
