"""What is read beside a forward pass goes by a plan where the table knows the step, and as before where it does not."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.linkers import LAYERS, Request, content, fill, forward, keys, make, mha, offload, same
from tests.store.kit import eventually
from tutti_sglang.integration.linker import TuttiLinker
from tutti_sglang.kernels import gio_native
from tutti_sglang.schedule.gate import process_gate
from tutti_sglang.schedule.rules import Mode

FROM, TO = [3, 9, 4, 5], [20, 11, 12, 30]
NEW = 512
LAYER_BYTES = 4 * 2 * 4096


@pytest.fixture(params=["auto", "gio"])
def world(disk: Path, request: pytest.FixtureRequest) -> Iterator[tuple[TuttiLinker, Any, list[torch.Tensor]]]:
    """A linker that reads during the forward pass, its pool, and what keys(4) hold."""
    if request.param == "gio" and gio_native.library() is None:
        pytest.skip("the gio engine's native library was not built")
    pool = mha()
    fill(pool, 1)
    want = content(pool, FROM)
    with contextlib.closing(make(pool, disk / "store", engine=request.param, preload=0)) as linker:
        assert offload(linker, keys(4), FROM)
        assert linker._tier.store.drain(8)
        fill(pool, 2)
        yield linker, pool, want
        process_gate().idle()


def _measured(linker: TuttiLinker, beside: float, load: float, alone: float = 0.4) -> None:
    """A prefill of NEW tokens takes so long alone and `beside` busy drives, and a layer's load `load` seconds."""
    for _ in range(3):
        linker._tier.timing.table.observe(NEW, 0, alone)
        linker._tier.timing.table.observe(NEW, 0, beside, beside=True)
    assert linker._loader._pacing
    linker._loader._pacing._loads.observe(LAYER_BYTES, load)


def _issued(world: Any, mode: Mode = Mode.PREFILL, new: int = NEW) -> list[int]:
    """Load keys(4) in such a step: how many layers might be read when each was about to be computed."""
    linker, pool, want = world
    request = Request(linker, "r", keys(4))
    assert request.lookup() == 4
    assert request.load(kv=TO)
    process_gate().begin(mode, new)
    got: list[int] = []

    def seen(layer: int) -> None:
        time.sleep(0.01)  # what is read too early would be there by now
        (batch,) = linker.layer_done_counter._batches.values()
        assert batch.ready <= batch.issued
        got.append(batch.issued)

    assert forward(linker, seen)
    assert same(content(pool, TO), want)
    return got


def _planned(linker: TuttiLinker) -> dict[str, float]:
    return {io: linker._metrics.value("tutti_planned_bytes", io=io) for io in ("due", "ahead", "write")}


def test_without_a_table_everything_is_read_at_once(world: Any) -> None:
    before = _planned(world[0])
    assert _issued(world) == [LAYERS] * LAYERS
    assert _planned(world[0]) == before


def test_what_was_not_measured_beside_io_is_read_at_once(world: Any) -> None:
    _measured(world[0], beside=0.4, load=0.0001)
    before = _planned(world[0])
    assert _issued(world, new=8 * NEW) == [LAYERS] * LAYERS
    assert _issued(world, mode=Mode.DECODE) == [LAYERS] * LAYERS, "the step that it belongs to was not told"
    assert _planned(world[0]) == before


def test_where_compute_hides_them_the_loads_run_ahead(world: Any) -> None:
    _measured(world[0], beside=0.4, load=0.001)
    before = _planned(world[0])
    assert _issued(world) == [LAYERS] * LAYERS
    after = _planned(world[0])
    assert after["due"] == before["due"] + 2 * LAYER_BYTES
    assert after["ahead"] == before["ahead"] + 2 * LAYER_BYTES


def test_where_compute_hides_nothing_each_load_waits_until_it_is_due(world: Any) -> None:
    _measured(world[0], beside=1.0, load=0.001)
    before = _planned(world[0])
    assert _issued(world) == [2, 3, 4, 4]
    assert _planned(world[0])["due"] == before["due"] + LAYERS * LAYER_BYTES


def test_where_it_hides_one_and_a_half_the_plan_is_between(world: Any) -> None:
    _measured(world[0], beside=0.4, load=0.05)  # of 0.1 s for each layer
    assert _issued(world) == [3, 4, 4, 4]


def test_writes_wait_for_the_last_load_and_get_the_slack_that_is_left(world: Any) -> None:
    linker, _, _ = world
    _measured(linker, beside=400, load=60, alone=400)  # layers 0 and 1 with 0, 2 with 1, 3 with 2
    window = linker._tier.store.window
    request = Request(linker, "r", keys(4))
    assert request.lookup() == 4
    assert request.load(kv=TO)
    process_gate().begin(Mode.PREFILL, NEW)
    process_gate().let_write(0)
    assert offload(linker, keys(8, 100), [*range(40, 48)])
    assert linker._tier.store.pending == 8
    window._rate = 8 * linker._loader._pacing._page_bytes / 50  # type: ignore[union-attr]
    open_: list[bool] = []
    before = _planned(linker)["write"]
    assert forward(linker, lambda layer: open_.append(window.calm(time.monotonic())))
    assert open_[:2] == [False, False]
    assert open_[2], "40 s are left beside the last load"
    assert _planned(linker)["write"] > before
    process_gate().idle()
    assert eventually(lambda: linker._tier.store.pending == 0)


def test_a_plan_that_fails_is_no_plan(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _measured(world[0], beside=1.0, load=0.001)
    monkeypatch.setattr(world[0]._tier.timing.table, "measured", None)
    assert _issued(world) == [LAYERS] * LAYERS


def test_a_batch_whose_forward_pass_never_comes_is_finished(world: Any) -> None:
    linker, pool, want = world
    _measured(linker, beside=1.0, load=0.001)
    request = Request(linker, "r", keys(4))
    assert request.lookup() == 4
    assert request.load(kv=TO)
    assert linker.start_layer_wise_loading() >= 0
    linker.reset()
    assert same(content(pool, TO), want)


def test_a_batch_whose_forward_pass_never_comes_holds_up_nobody_behind_it(world: Any) -> None:
    linker, pool, want = world
    _measured(linker, beside=1.0, load=0.001)
    for rid, slots in (("left out", FROM), ("served", TO)):
        request = Request(linker, rid, keys(4))
        assert request.lookup() == 4
        assert request.load(kv=slots)
        if rid == "left out":
            assert linker.start_layer_wise_loading() >= 0
    assert forward(linker)
    assert same(content(pool, TO), want)
