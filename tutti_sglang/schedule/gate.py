"""The scheduler's side of the gate: each step is told to the windows of this process's stores, and timed."""

import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

from tutti_sglang.engine.window import Window
from tutti_sglang.metrics import Metrics, process_metrics
from tutti_sglang.schedule.rules import Mode, heard_until, writes_until

MOST_PENDING = 16
"""Steps whose end was not seen yet; older ones are forgotten."""

_FLUSH = 1_000_000_000  # ns between two writes to the metrics, which cost microseconds each


class Mark(Protocol):
    """Something on the device that says when a step has ended, without waiting for it."""

    def seconds(self) -> float | None:
        """How long the step took; None while it runs."""


class Clockwork(Protocol):
    """What knows how long steps take (`slack.Table`)."""

    def roughly(self, new: int, prefix: float) -> float:
        """Seconds of a prefill of `new` tokens on `prefix` tokens; 0 where nothing is known."""

    def slack(self, new: int, prefix: float) -> float:
        """Seconds of it in which I/O costs nothing."""

    def note(self, new: int, prefix: float, seconds: float, *, beside: bool = False) -> None:
        """A prefill took so long, `beside` I/O."""


class Step(NamedTuple):
    """One step. `prefix`: tokens that each new token attends to before the first of its own, on average; `beside`:
    whether I/O was in flight when it began."""

    mode: Mode
    new: int
    prefix: float
    start: int
    beside: bool


class Gate:
    """For one scheduler thread; the windows may be asked by any. A call costs about a microsecond."""

    def __init__(self, metrics: Metrics, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.windows: list[Window] = []
        self.clockwork: Clockwork | None = None
        self._metrics, self._clock = metrics, clock
        self._pending: deque[tuple[Step, Mark]] = deque(maxlen=MOST_PENDING)
        self._spent = [0] * len(Mode)
        self._mode, self._since = Mode.IDLE, clock()
        self._flushed = self._heard = self._since
        self.step = Step(Mode.IDLE, 0, 0.0, self._since, False)
        """The one that was begun last."""

    @property
    def listening(self) -> bool:
        """Whether there is any use in telling it."""
        return bool(self.windows) or self.clockwork is not None

    def stop(self) -> None:
        """Tell nobody any more."""
        self.windows, self.clockwork = [], None
        self._pending.clear()

    def attach(self, window: Window) -> None:
        """Tell this window too, from now on."""
        if window.enabled and window not in self.windows:
            self.windows = [*self.windows, window]

    def detach(self, window: Window) -> None:
        """Tell it no more."""
        self.windows = [each for each in self.windows if each is not window]

    def begin(self, mode: Mode, new: int = 0, prefix: float = 0.0) -> Step:
        """A step is launched. End it with `end` or `launched`."""
        now = self._clock()
        slack, heard = 0.0, now
        if mode is Mode.PREFILL and self.clockwork:
            slack = self.clockwork.slack(new, prefix)
            heard = heard_until(now, self.clockwork.roughly(new, prefix))
        self._tell(mode, now, writes_until(mode, now, slack), heard)
        self._heard = heard
        self.step = Step(mode, new, prefix, now, mode is Mode.PREFILL and self._busy(now))
        return self.step

    def let_write(self, seconds: float) -> None:
        """Within the step that was begun last: writes may start for so long from now, and no more of them."""
        now = self._clock()
        for window in self.windows:
            window.hear(self._mode, now + int(seconds * 1e9), max(now, self._heard))

    def end(self, step: Step) -> None:
        """It is done: the device is the CPU, which was waited for."""
        now = self._clock()
        self._observe(step, (now - step.start) / 1e9, now)

    def launched(self, step: Step, mark: Mark) -> None:
        """It runs on; `mark` will tell when it is done."""
        self._pending.append((step, mark))

    def poll(self) -> None:
        """Look which steps have ended."""
        while self._pending:
            seconds = self._pending[0][1].seconds()
            if seconds is None:
                return
            self._observe(self._pending.popleft()[0], seconds, self._clock())

    def idle(self) -> None:
        """The scheduler has nothing to run."""
        self.poll()
        if not self._pending:
            now = self._clock()
            self._tell(Mode.IDLE, now, writes_until(Mode.IDLE, now, 0.0), now)

    def _tell(self, mode: Mode, now: int, until: int, heard: int) -> None:
        for window in self.windows:
            window.hear(mode, until, heard)
        self._spent[self._mode] += now - self._since
        self._mode, self._since = mode, now
        if now - self._flushed > _FLUSH:
            self._flush(now)

    def _observe(self, step: Step, seconds: float, now: int) -> None:
        if step.mode is Mode.PREFILL and self.clockwork and step.beside is self._busy(now):
            self.clockwork.note(step.new, step.prefix, seconds, beside=step.beside)

    def _busy(self, now: int) -> bool:
        for window in self.windows:  # noqa: SIM110 - a generator would cost half as much again
            if window.busy(now):
                return True
        return False

    def _flush(self, now: int) -> None:
        self._flushed = now
        for mode in Mode:
            self._metrics.add("tutti_step_seconds", self._spent[mode] / 1e9, mode=mode.name.lower())
            self._spent[mode] = 0


@cache
def process_gate() -> Gate:
    """The gate of this process's scheduler."""
    return Gate(process_metrics())
