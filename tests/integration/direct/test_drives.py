"""Loads from drives that are slow, fail or hang, and loads of many times the memory: the linker on real pools, over
NVMe controllers that can be told to misbehave."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.hicache_storage import PoolName

from tests.integration.linkers import (
    FULL,
    Request,
    admitted,
    content,
    fill,
    forward,
    keys,
    make,
    mha,
    offload,
    same,
    watcher,
)
from tests.store.kit import eventually
from tutti_sglang.gio.controller import Faults
from tutti_sglang.integration.direct import loading
from tutti_sglang.integration.direct.movers import StreamMover
from tutti_sglang.integration.direct.pools import device_pools
from tutti_sglang.integration.linker import TuttiLinker
from tutti_sglang.kernels import gio_native
from tutti_sglang.store import doubts

FROM, TO = [3, 9, 4, 5], [20, 11, 12, 30]


def _drives(linker: TuttiLinker, faults: Faults) -> None:
    for drive in linker._tier.store._parts.engine._drives.values():  # type: ignore[attr-defined]
        drive.backend.controller.set_faults(faults)


@pytest.fixture
def on_gio(disk: Path) -> Iterator[tuple[TuttiLinker, Any, list[torch.Tensor]]]:
    """A linker over drives that can be told to misbehave, its pool, and what keys(4) hold."""
    if gio_native.library() is None:
        pytest.skip("the gio engine's native library was not built")
    pool = mha()
    fill(pool, 1)
    want = content(pool, FROM)
    linker = make(pool, disk / "store", engine="gio", preload=0)
    assert offload(linker, keys(4), FROM)
    assert linker._tier.store.drain(8)
    fill(pool, 2)
    yield linker, pool, want
    _drives(linker, Faults())
    for drive in linker._tier.store._parts.engine._drives.values():  # type: ignore[attr-defined]
        drive.backend.controller.release_dropped()
    linker.close()


def test_on_a_slow_drive_each_layer_is_awaited_and_whole(on_gio: Any) -> None:
    linker, pool, want = on_gio
    _drives(linker, Faults(delay=1.0, delay_seconds=0.2, writes=False))
    request = Request(linker, "r", keys(4))
    assert request.lookup() == 4
    assert request.load(kv=TO)
    seen, got = watcher(pool, TO, want)
    assert forward(linker, seen)
    assert got == [True] * 4
    assert linker._metrics.value("tutti_load_wait_seconds") > 0


def test_a_drive_that_fails_in_a_load_costs_that_batch_and_spoils_nothing(
    on_gio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    linker, pool, want = on_gio
    monkeypatch.setattr(doubts, "HIDDEN_SECONDS", 1.0)
    request = Request(linker, "r", keys(4))
    assert request.lookup() == 4
    assert request.load(kv=TO)
    _drives(linker, Faults(fail=1.0, writes=False))
    assert not forward(linker), "SGLang aborts the requests of the batch"
    _drives(linker, Faults())
    again = Request(linker, "again", keys(4))
    assert again.lookup() == 0, "they are computed meanwhile"
    assert eventually(lambda: again.lookup() == 4), "the drive serves again, and the pages are what they were"
    assert again.load(kv=TO)
    assert forward(linker)
    assert same(content(pool, TO), want)


def test_finish_does_not_return_while_a_drive_may_write_to_a_slot(on_gio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    linker, pool, _ = on_gio
    monkeypatch.setattr(loading, "LAYER_SECONDS", 0.2)
    request = Request(linker, "r", keys(4))
    assert request.lookup() == 4
    assert request.load(kv=TO)
    _drives(linker, Faults(drop=1.0, writes=False))
    done = threading.Event()
    thread = threading.Thread(target=lambda: (forward(linker), done.set()))
    thread.start()
    assert not done.wait(2), "deadlines are over, answers are not there"
    _drives(linker, Faults())
    while not done.wait(0.05):
        for drive in linker._tier.store._parts.engine._drives.values():
            drive.backend.controller.release_dropped()
    thread.join()
    fill(pool, 5)
    before = content(pool, TO)
    time.sleep(0.3)
    assert same(content(pool, TO), before)


def test_a_prefix_of_many_times_the_memory_is_loaded_within_it(disk: Path) -> None:
    """Neither staging nor reading ahead grows with the prompt: what there is no room for goes through, or straight."""
    pool = mha(pages=600, layer_num=8)
    fill(pool, 1)
    for engine, preload in (("auto", "1MiB"), ("gio", 0)):
        if engine == "gio" and gio_native.library() is None:
            continue
        linker = make(pool, disk / engine, engine=engine, preload=preload, staging_size="4MiB", segment_size="8MiB")
        places = [*range(1, 301)]
        for start in range(0, 300, 100):
            assert offload(linker, keys(100, start), places[start : start + 100])
            assert linker._tier.store.drain(8)
        want = content(pool, places)
        request = Request(linker, "long", keys(300)).arrive()
        assert admitted(linker, "long")
        assert request.lookup() == 300
        assert request.load(kv=[*range(301, 601)])
        assert forward(linker)
        assert same(content(pool, [*range(301, 601)]), want)
        loaded = 300 * linker.pools[PoolName.KV].view.page_bytes
        assert loaded >= 4 * (4 << 20)
        assert linker._tier.store._parts.staging.high_water <= 4 << 20
        assert linker._room is None or linker._room.size <= 1 << 20
        linker.close()


def test_640k_tokens_take_next_to_no_memory_of_the_device() -> None:
    """Llama-3.1-8B in pages of 64 tokens, 80 GiB of KV: what the copies of a load need there is page numbers and
    addresses; measured at small size, the same formula gives the plan."""
    pool = mha()
    (part,) = device_pools(pool, FULL).values()
    mover = StreamMover([part], torch.device("cpu"))
    mover.begin()
    tensors = len(part.view.maps[0].sizes)
    numbers = mover.slots(part, torch.arange(16 * part.view.page_size), 16)
    source = mover.source(part.view.maps[0].rows(numbers.numpy()))
    assert numbers.nbytes + source.nbytes == StreamMover.device_bytes(16, tensors)
    pages, layers = 640 * 1024 // 64, 32
    assert StreamMover.device_bytes(pages, 2 * layers) < 6 << 20
