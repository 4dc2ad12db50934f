"""What the hooks make of SGLang's batches; that they take in a scheduler is in test_plugin, real steps in
test_scheduling."""

import logging
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tutti_sglang.engine.rows import Rows
from tutti_sglang.engine.window import Window
from tutti_sglang.integration import break_even, scheduler_hooks
from tutti_sglang.integration.scheduler_hooks import MODES, prefill_of
from tutti_sglang.metrics import Metrics
from tutti_sglang.schedule.gate import Gate
from tutti_sglang.schedule.rules import Mode
from tutti_sglang.schedule.slack import Table

SCHEDULER = SimpleNamespace(device="cpu")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    metrics = Metrics(CollectorRegistry())
    gate = Gate(metrics)
    window = Window(Rows(uuid.uuid4().hex), metrics, (0,))
    gate.attach(window)
    gate.clockwork = Table({})
    monkeypatch.setattr(scheduler_hooks, "process_gate", lambda: gate)
    yield gate
    window.close()


def _batch(mode: ForwardMode, own: list[int] | None = None, prefixes: list[int] | None = None) -> Any:
    return SimpleNamespace(forward_mode=mode, extend_lens=own, prefix_lens=prefixes)


def _run(batch: Any, step: Any = lambda *_: "result") -> Any:
    return scheduler_hooks._run_batch(step, SCHEDULER, batch)


def test_every_mode_of_this_sglang_has_its_meaning() -> None:
    assert {mode for mode in ForwardMode if mode not in MODES} == {ForwardMode.PREBUILT}  # nothing is computed in it


@pytest.mark.parametrize(
    ("own", "prefixes", "prefix"),
    [([100], [0], 0), ([100], [400], 400), ([10, 10], [0, 400], 195), ([64] * 32, [0] * 32, 0)],
)
def test_a_batch_counts_as_one_prefill_of_equal_attention(own: list[int], prefixes: list[int], prefix: float) -> None:
    new, found = prefill_of(_batch(ForwardMode.EXTEND, own, prefixes))
    assert new == sum(own)
    assert found == prefix
    attended = sum(n * (p + n / 2) for n, p in zip(own, prefixes, strict=True))
    assert new * (found + new / 2) >= attended


def test_stale_counts_of_a_decode_batch_are_not_looked_at(gate: Gate) -> None:
    _run(_batch(ForwardMode.DECODE, [999], [999]))
    assert isinstance(gate.clockwork, Table)
    gate.clockwork.learn()
    assert gate.clockwork.count == 0


def test_a_prefill_is_timed_and_a_part_of_one_is_not(gate: Gate) -> None:
    _run(_batch(ForwardMode.EXTEND, [64], [0]))
    _run(_batch(ForwardMode.SPLIT_PREFILL, [64], [0]))
    _run(_batch(ForwardMode.EXTEND, None, None))
    assert isinstance(gate.clockwork, Table)
    gate.clockwork.learn()
    assert [(new, prefix) for new, prefix, _, _ in gate.clockwork.rows()] == [(64, 0)]


def test_an_error_in_the_hooks_is_not_the_steps(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert _run(SimpleNamespace()) == "result"  # no forward_mode
        scheduler_hooks._idle(SCHEDULER)
        scheduler_hooks._processed(None, SCHEDULER)
    assert not gate.listening
    assert "not followed any more" in caplog.text
    assert _run(_batch(ForwardMode.DECODE)) == "result"


def test_an_error_of_the_step_is_sglangs(gate: Gate) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _run(_batch(ForwardMode.EXTEND, [64], [0]), fails)
    assert gate.listening


def test_idle_is_told(gate: Gate) -> None:
    _run(_batch(ForwardMode.EXTEND, [64], [0]))
    scheduler_hooks._idle(SCHEDULER)
    assert gate._mode is Mode.IDLE


def test_a_request_is_announced_with_what_is_there_of_it_already(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    timing = SimpleNamespace(announce=lambda *args: told.append(args))
    monkeypatch.setattr(break_even, "_timings", [timing])
    request = SimpleNamespace(rid="r")
    original = lambda *args, **kwargs: (args, kwargs)  # noqa: E731
    args, kwargs = break_even._announce(
        original, "cache", request, 5, [1, 2, 3], "hash", None, matched_prefix_tokens=[9] * 7, extra_key=None
    )
    assert args == ("cache", request, 5, [1, 2, 3], "hash", None)
    assert kwargs == {"matched_prefix_tokens": [9] * 7, "extra_key": None}
    break_even._announce(original, "cache", request, 5, [1, 2, 3], "hash", None, [9] * 8)
    break_even._announce(original, "cache", request, last_host_node_id=5, new_input_tokens=[1])
    break_even._announce(original, "cache", None)  # what it does not understand is passed on
    assert told == [("r", 7, 4), ("r", 8, 4), ("r", 0, 2)]
