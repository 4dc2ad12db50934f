"""Hooks into SGLang's scheduler loop that tell the gate what runs. A few microseconds a step; they change nothing that
SGLang does, on no rank."""

import logging
from collections.abc import Callable
from operator import mul
from typing import Any, TypeVar

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookType

from tutti_sglang.integration.hook import Hook
from tutti_sglang.schedule.gate import Gate, Step, process_gate
from tutti_sglang.schedule.rules import Mode

logger = logging.getLogger(__name__)
T = TypeVar("T")

MODES = {
    ForwardMode.EXTEND: Mode.PREFILL,
    ForwardMode.MIXED: Mode.PREFILL,
    ForwardMode.SPLIT_PREFILL: Mode.PREFILL,
    ForwardMode.DLLM_EXTEND: Mode.PREFILL,
    ForwardMode.DECODE: Mode.DECODE,
    ForwardMode.TARGET_VERIFY: Mode.DECODE,
    ForwardMode.DRAFT_EXTEND_V2: Mode.DECODE,
    ForwardMode.IDLE: Mode.IDLE,
}
"""Of a batch's `forward_mode`. Its token counts are looked at in a prefill only: in a decode batch they are those of
the last prefill (contract §5)."""


class DeviceMark:
    """A pair of timing events on the stream of the forward pass; asking them waits for nothing."""

    def __init__(self, module: Any, stream: Any) -> None:
        self._stream = stream
        self._start, self._end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        self._start.record(stream)

    def launched(self) -> "DeviceMark":
        """Everything of the step is on the stream."""
        self._end.record(self._stream)
        return self

    def seconds(self) -> float | None:
        """As gate.Mark."""
        return float(self._start.elapsed_time(self._end)) / 1e3 if self._end.query() else None


def _run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    gate = process_gate()
    if not gate.listening:
        return original(scheduler, batch, *args, **kwargs)
    begun = _safely(gate, _begin, scheduler, batch)
    result = original(scheduler, batch, *args, **kwargs)
    if begun:
        _safely(gate, _end, *begun)
    return result


def _begin(gate: Gate, scheduler: Any, batch: Any) -> tuple[Step, DeviceMark | None]:
    mode = MODES.get(batch.forward_mode, Mode.OTHER)
    if mode is not Mode.PREFILL:
        return gate.begin(mode), None
    step = gate.begin(mode, *prefill_of(batch))
    if scheduler.device == "cpu" or gate.clockwork is None:
        return step, None
    stream = scheduler.forward_stream if scheduler.enable_overlap else scheduler.schedule_stream
    return step, DeviceMark(scheduler.device_module, stream)


def _end(gate: Gate, step: Step, mark: DeviceMark | None) -> None:
    if mark:
        gate.launched(step, mark.launched())
    else:
        gate.end(step)


def prefill_of(batch: Any) -> tuple[int, float]:
    """New tokens of a prefill, and how many tokens before its request's new ones each attends to on average. 0 of one
    that runs in parts: the time of a part says nothing."""
    if batch.forward_mode is ForwardMode.SPLIT_PREFILL:
        return 0, 0.0
    own, prefixes = batch.extend_lens or (), batch.prefix_lens or ()
    new = sum(own)
    attended = sum(map(mul, own, prefixes)) + sum(map(mul, own, own)) / 2
    return new, max(0.0, attended / new - new / 2) if new else 0.0


def _processed(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    gate = process_gate()
    if gate.listening:
        _safely(gate, Gate.poll)


def _idle(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    gate = process_gate()
    if gate.listening:
        _safely(gate, Gate.idle)


def _safely(gate: Gate, act: Callable[..., T], *args: Any) -> T | None:
    """Nothing of ours may end a step: after an error the gate hears no more, and counts as idle."""
    try:
        return act(gate, *args)
    except Exception:
        logger.exception("tutti: the scheduler's steps are not followed any more; writes only wait for reads now")
        gate.stop()
        return None


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

SCHEDULER_HOOKS = (
    Hook(f"{_SCHEDULER}.run_batch", HookType.AROUND, _run_batch, ("self", "batch")),
    Hook(f"{_SCHEDULER}.process_batch_result", HookType.AFTER, _processed, ("self", "batch", "result")),
    Hook(f"{_SCHEDULER}.on_idle", HookType.BEFORE, _idle, ("self",)),
)
