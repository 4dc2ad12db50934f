"""The linker on a real store with real device pools: what SGLang's scheduler asks of it, and gets."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from tests.engine import cufile
from tests.integration.linkers import (
    FULL,
    MAMBA,
    SWA,
    Request,
    admitted,
    buffers,
    content,
    fill,
    forward,
    hnd,
    hybrid,
    keys,
    make,
    mha,
    mla,
    move_by,
    offload,
    parts_of,
    same,
    slots,
    swa,
    watcher,
)
from tests.store.kit import eventually
from tutti_sglang.errors import UnsupportedError
from tutti_sglang.integration.direct.gds import GdsMover
from tutti_sglang.integration.direct.movers import StreamMover
from tutti_sglang.integration.linker import TuttiLinker
from tutti_sglang.integration.pools import view_of
from tutti_sglang.kernels import gio_native

Open = Callable[..., TuttiLinker]
FROM, TO = [3, 9, 4, 5], [20, 11, 12, 30]


@pytest.fixture(params=["host", "gio", "stream", "gds"])
def opened(disk: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Linkers on one store; closed at the end. With `gio` drives write into the slots; with `stream` the CPU stands in
    for a device whose memory only its kernels reach; with `gds` drives reach its staging too, by what stands in for
    cuFile."""
    if request.param == "gio" and gio_native.library() is None:
        pytest.skip("the gio engine's native library was not built")
    if request.param == "stream":
        move_by(monkeypatch, StreamMover)
    if request.param == "gds":
        cufile.install(monkeypatch)
        move_by(monkeypatch, GdsMover)
    made: list[TuttiLinker] = []

    def open_one(pool: Any, components: Any = FULL, **extra: Any) -> TuttiLinker:
        if request.param == "stream" and extra.get("preload") == 0:
            pytest.skip("nothing can be loaded by this mover without memory for it")
        engine = "gio" if request.param == "gio" else "auto"
        made.append(make(pool, disk / "store", components, **({"engine": engine} | extra)))
        return made[-1]

    yield open_one
    for linker in made:
        linker.close()


@pytest.mark.parametrize("preload", ["8MiB", 0])
@pytest.mark.parametrize("kind", [mha, hnd, mla])
def test_what_is_offloaded_is_loaded_into_other_slots_after_a_restart(opened: Open, kind: Any, preload: Any) -> None:
    pool = kind()
    fill(pool, 1)
    want = content(pool, FROM)
    first = opened(pool)
    assert offload(first, keys(4), FROM)
    first.close()
    fill(pool, 2)
    linker = opened(pool, preload=preload)
    request = Request(linker, "r", keys(6)).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == 4
    untouched = content(pool, FROM)
    assert request.load(kv=TO)
    assert forward(linker)
    assert same(content(pool, TO), want)
    assert same(content(pool, FROM), untouched)
    assert linker._metrics.value("tutti_preload_bytes", kind="used") == 0


@pytest.mark.parametrize("preload", ["8MiB", 0])
def test_a_layer_is_whole_when_the_forward_may_read_it(opened: Open, preload: Any) -> None:
    pool = mha()
    fill(pool, 1)
    want, linker = content(pool, FROM), opened(pool, preload=preload)
    assert offload(linker, keys(4), FROM)
    fill(pool, 2)
    Request(linker, "r", keys(4)).arrive()
    assert admitted(linker, "r")
    assert Request(linker, "r", keys(4)).lookup() == 4
    assert Request(linker, "r", keys(4)).load(kv=TO)
    seen, got = watcher(pool, TO, want)
    assert forward(linker, seen)
    assert got == [True] * 4


@pytest.mark.parametrize("preload", ["8MiB", 0])
def test_a_sliding_window_is_restored_with_the_rest_or_not_at_all(opened: Open, preload: Any) -> None:
    pool = swa()
    fill(pool, 1)
    parts = parts_of(pool)
    want = {"kv": content(parts["kv"], FROM), "swa": content(parts["swa"], [7, 2])}
    linker = opened(pool, SWA, preload=preload)
    assert offload(linker, keys(4), FROM, swa=[7, 2])  # the windows of pages 2 and 3
    assert offload(linker, keys(1, 4), [6])  # no window ends here
    fill(pool, 2)
    request = Request(linker, "r", keys(5), window=2).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == 4
    assert request.load(kv=TO, swa=[14, 1])
    assert forward(linker)
    assert same(content(parts["kv"], TO), want["kv"])
    assert same(content(parts["swa"], [14, 1]), want["swa"])


@pytest.mark.parametrize("preload", ["8MiB", 0])
def test_a_state_is_restored_with_the_attention_beside_it_or_not_at_all(opened: Open, preload: Any) -> None:
    pool = hybrid()
    fill(pool, 1)
    parts = parts_of(pool)
    want = {"kv": content(parts["kv"], FROM), "mamba": content(parts["mamba"], [7])}
    linker = opened(pool, MAMBA, preload=preload)
    assert pool.told is linker.layer_done_counter, "the states' pool waits for layers too"
    assert offload(linker, keys(4), FROM, mamba=[7])  # what is left of all four at their end
    assert offload(linker, keys(1, 4), [6])  # no state is kept here
    fill(pool, 2)
    short = Request(linker, "short", keys(3), 1, PoolName.MAMBA).arrive()
    request = Request(linker, "r", keys(5), 1, PoolName.MAMBA).arrive()
    assert admitted(linker, "short", "r")
    assert short.lookup() == 0
    assert request.lookup() == 4
    others = content(parts["mamba"], [*range(9), *range(10, 17)])
    assert request.load(kv=TO, mamba=[9])
    seen = list[bool]()
    half = len(want["kv"]) // 2

    def look(layer: int) -> None:
        kind, place = ("kv", layer // 2) if layer % 2 else ("mamba", layer // 2)
        now = content(parts[kind], TO if kind == "kv" else [9])
        step = half if kind == "kv" else 2
        seen.append(all(torch.equal(now[at], want[kind][at]) for at in range(place, len(now), step)))

    assert forward(linker, look)
    assert seen == [True] * 4
    assert same(content(parts["mamba"], [*range(9), *range(10, 17)]), others)
    assert same(content(parts["kv"], TO), want["kv"])


def test_both_paths_mean_the_same_by_a_state(opened: Open) -> None:
    """Equal namespaces and sizes: what one stored, the other reads."""
    pool = hybrid()
    ours = opened(pool, MAMBA).pools[PoolName.MAMBA].view
    (info,) = pool.mamba_pool.get_device_pool_infos()
    hosts = view_of(
        MambaPoolHost(info.buffer_info, 2.0, 0, device_capacity=16, pin_memory=False, layout="page_first_direct")
    )
    for name in ("dtype", "page_size", "layers", "heads", "sharded", "packs_draft"):
        assert getattr(ours, name) == getattr(hosts, name), name
    assert [each.sizes for each in ours.maps] == [each.sizes for each in hosts.maps]


def test_requests_of_one_batch_are_loaded_together_and_other_batches_do_not_wait(opened: Open) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool)
    want = content(pool, [1, 2, 3, 4])
    assert offload(linker, keys(4), [1, 2, 3, 4])
    one = Request(linker, "one", keys(2)).arrive()
    two = Request(linker, "two", keys(4)).arrive()
    assert admitted(linker, "one", "two")
    assert (one.lookup(), two.lookup()) == (2, 4)
    assert one.load(kv=[10, 11])
    assert two.load(kv=[12, 13, 14, 15])
    assert forward(linker)
    assert same(content(pool, [10, 11]), [each[:2] for each in want])
    assert same(content(pool, [12, 13, 14, 15]), want)
    assert linker.start_layer_wise_loading() == -1
    for index in (-1, 0, 99):  # nothing queued, finished, never known
        linker.layer_done_counter.set_consumer(index)
        linker.layer_done_counter.wait_until(3)
        assert linker.finish_layer_wise_loading(index)


def test_pages_that_are_stored_are_not_written_again(opened: Open) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool)
    assert offload(linker, keys(3), [1, 2, 3])
    assert linker._tier.store.drain(8)
    before = linker._metrics.value("tutti_put_objects", outcome="written")
    assert offload(linker, keys(5), [1, 2, 3, 4, 5])
    assert linker._tier.store.drain(8)
    assert linker._metrics.value("tutti_put_objects", outcome="written") == before + 2


def test_offloads_complete_once_each_in_their_order_and_are_bounded(opened: Open) -> None:
    pool = mha(pages=40)
    fill(pool, 1)
    linker = opened(pool)
    gate = _Gate()
    linker.record_offload_ready = lambda: [gate]  # type: ignore[method-assign]
    transfers = [[PoolTransfer(name=PoolName.KV, keys=keys(4, n), device_indices=slots([1, 2, 3, 4]))] for n in (0, 4)]
    assert linker.offload(transfers[0])
    assert linker.offload(transfers[1])
    assert not linker.offload([PoolTransfer(name=PoolName.KV, keys=keys(8, 8), device_indices=slots([*range(1, 9)]))])
    assert linker.num_completed_offloads() == 0, "the pages may still be written to"
    gate.open()
    assert eventually(lambda: linker.num_completed_offloads() == 2)
    assert [linker.pop_completed_offload(), linker.pop_completed_offload()] == [True, True]
    assert linker.num_completed_offloads() == 0
    assert offload(linker, keys(8, 8), [*range(1, 9)])


class _Gate:
    """An event of the device that has not come yet."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.open = self._event.set

    def synchronize(self) -> None:
        assert self._event.wait(20)


def test_a_reset_leaves_nothing_queued_pending_or_staged(opened: Open) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool)
    assert offload(linker, keys(4), FROM)
    request = Request(linker, "r", keys(4)).arrive()
    other = Request(linker, "s", keys(4)).arrive()
    assert admitted(linker, "r", "s")
    assert request.lookup() == 4
    assert request.load(kv=TO)
    assert linker.offload([PoolTransfer(name=PoolName.KV, keys=keys(2, 50), device_indices=slots([1, 2]))])
    linker.reset()
    assert linker.num_completed_offloads() == 0
    assert linker.start_layer_wise_loading() == -1
    assert not linker.cancel_queued_load("r")
    assert other.lookup() == 0, "the tree is empty, and requests come again"
    assert linker._metrics.value("tutti_preload_bytes", kind="used") == 0
    assert offload(linker, keys(2, 60), [1, 2])


def test_a_cancelled_load_touches_nothing_and_gives_its_memory_back(opened: Open) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool)
    assert offload(linker, keys(4), FROM)
    request = Request(linker, "r", keys(4)).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == 4
    before = content(pool, TO)
    assert request.load(kv=TO)
    assert linker.cancel_queued_load("r")
    assert not linker.cancel_queued_load("r")
    assert forward(linker)
    assert same(content(pool, TO), before)
    assert linker._metrics.value("tutti_preload_bytes", kind="used") == 0


def test_pages_that_were_evicted_between_lookup_and_load_are_computed(opened: Open) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool, preload=0)
    assert offload(linker, keys(4), FROM)
    request = Request(linker, "r", keys(4))
    assert request.lookup() == 4
    linker._tier.clear()
    assert not request.load(kv=TO)
    assert linker.start_layer_wise_loading() == -1


def test_pages_are_kept_from_eviction_until_their_load_has_ended(opened: Open) -> None:
    pool = mha()
    fill(pool, 1)
    want, linker = content(pool, FROM), opened(pool, preload=0)
    assert offload(linker, keys(4), FROM)
    assert linker._tier.store.drain(8)
    request = Request(linker, "r", keys(4))
    assert request.lookup() == 4
    assert request.load(kv=TO)
    linker._tier.clear()  # the records go, the slots stay
    fill(pool, 3)
    for start in range(100, 700, 40):
        assert offload(linker, keys(40, start), [*range(1, 41)])
    assert forward(linker)
    assert same(content(pool, TO), want)


def test_suspended_it_neither_reads_nor_writes_until_the_flush(opened: Open) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool)
    assert offload(linker, keys(4), FROM)
    request = Request(linker, "r", keys(4)).arrive()
    assert admitted(linker, "r")
    linker.suspend("the weights are being updated")
    assert request.lookup() == 0
    assert not linker.offload([PoolTransfer(name=PoolName.KV, keys=keys(2, 9), device_indices=slots([1, 2]))])
    linker.reset()
    linker.flushed()
    again = Request(linker, "r", keys(4)).arrive()
    assert admitted(linker, "r")
    assert again.lookup() == 4, "it was told of an update, and the weights are the same"
    assert offload(linker, keys(2, 9), [1, 2])


def test_what_is_not_served_is_refused_by_name(opened: Open) -> None:
    with pytest.raises(UnsupportedError, match="MHATokenToKVPool is not served"):
        opened(mha(), MAMBA)
    with pytest.raises(UnsupportedError, match="HybridLinearKVPool is not served"):
        opened(hybrid(), (*MAMBA, ComponentType.SWA))
    sides = hybrid()
    rows = torch.zeros(17, 8)
    state = SimpleNamespace(iter_transfer_state_entries=lambda: [("", rows, 0, 0)])
    sides.mamba_pool.register_slot_state(state)
    with pytest.raises(UnsupportedError, match="side states"):
        opened(sides, MAMBA)
    with pytest.raises(UnsupportedError, match='"path": "host" is not served here'):
        opened(mha(), path="host")
    with pytest.raises(UnsupportedError, match="MHATokenToKVPool is not served"):
        opened(mha(), SWA)


def _spoil(store: Path) -> None:
    """A bit of every tensor in the store flips."""
    for file in (store / "segments").glob("*.seg"):
        content = bytearray(file.read_bytes())
        for at in range(0, len(content), 4096):
            content[at] ^= 1
        file.write_bytes(content)


def test_pages_that_a_disk_spoiled_are_not_reported_when_they_are_read_ahead(opened: Open, disk: Path) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool)
    assert offload(linker, keys(4), FROM)
    assert linker._tier.store.drain(8)
    _spoil(disk / "store")
    request = Request(linker, "r", keys(4)).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == 0
    assert linker._metrics.value("tutti_preload_bytes", kind="used") == 0


def test_a_load_that_fails_in_the_forward_pass_is_told_and_leaves_the_store_clean(opened: Open, disk: Path) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool, preload=0)
    assert offload(linker, keys(4), FROM)
    assert linker._tier.store.drain(8)
    _spoil(disk / "store")
    before = linker._metrics.value("tutti_load_requests", outcome="failed")
    bad, good = Request(linker, "bad", keys(4)), Request(linker, "good", keys(2, 50))
    assert bad.lookup() == 4
    assert bad.load(kv=TO)
    assert not forward(linker), "SGLang aborts the requests of the batch"
    assert linker._metrics.value("tutti_load_requests", outcome="failed") == before + 1
    assert eventually(lambda: bad.lookup() == 0), "it is computed the next time"
    assert offload(linker, keys(2, 50), FROM[:2])
    assert good.lookup() == 2
    assert good.load(kv=TO[:2])
    assert forward(linker), "a batch that failed does not touch the next one"


def test_with_gio_pages_that_are_not_staged_come_straight_into_their_slots(disk: Path) -> None:
    pool = mha()
    fill(pool, 1)
    want = content(pool, FROM)
    with contextlib.closing(make(pool, disk / "store", engine="gio", preload=0)) as first:
        assert first._mover.name.startswith("gio")
        assert offload(first, keys(4), FROM)
    fill(pool, 2)
    with contextlib.closing(make(pool, disk / "store", engine="gio", preload=0)) as linker:
        request = Request(linker, "r", keys(4))
        assert request.lookup() == 4
        assert request.load(kv=TO)
        before = linker._tier.store._parts.staging.high_water
        assert forward(linker)
        assert linker._tier.store._parts.staging.high_water == before
        assert same(content(pool, TO), want)


def test_no_copy_is_under_way_when_finish_returns(opened: Open) -> None:
    pool = mha()
    fill(pool, 1)
    linker = opened(pool)
    assert offload(linker, keys(4), FROM)
    for round_ in range(20):
        request = Request(linker, f"r{round_}", keys(4)).arrive()
        assert admitted(linker, f"r{round_}")
        assert request.lookup() == 4
        assert request.load(kv=TO)
        assert forward(linker)
        mark = round_ % 200
        for buffer in buffers(pool):
            buffer[TO] = mark  # SGLang gives the slots to somebody else at once
        assert all((buffer[TO] == mark).all() for buffer in buffers(pool))


def test_slots_that_are_no_pages_of_the_pool_fail_the_load_and_nothing_else(opened: Open) -> None:
    pool = mha(pages=40)
    fill(pool, 1)
    linker = opened(pool)
    if not linker._mover.reaches:
        pytest.skip("the slots of a device are not looked at from the host, which would have to wait for them")
    assert offload(linker, keys(4), FROM)
    request = Request(linker, "r", keys(4)).arrive()
    assert admitted(linker, "r")
    assert request.lookup() == 4
    before = content(pool, [*range(40)])
    assert request.load(kv=[20, 11, 12, 4000])
    assert not forward(linker)
    assert same(content(pool, [*range(40)]), before)
    assert linker._metrics.value("tutti_preload_bytes", kind="used") == 0
