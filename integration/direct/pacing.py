"""How much of a batch's loads is issued with which layer of its forward pass, from what was measured of this model and
these drives; and how much may be written beside them."""

import logging
import math
import time
from collections.abc import Sequence

from tutti_sglang.integration.break_even import Timing
from tutti_sglang.metrics import Metrics
from tutti_sglang.schedule.gate import Gate
from tutti_sglang.schedule.layer_plan import Issue, Speed, Work, explain, plan_layers
from tutti_sglang.schedule.rules import Mode
from tutti_sglang.schedule.slack import Curve
from tutti_sglang.store import ObjectStore

logger = logging.getLogger(__name__)


class Pacing:
    """Of one linker, on the scheduler thread; `loaded` on the loader's. No call raises."""

    def __init__(self, timing: Timing, store: ObjectStore, page_bytes: int, gate: Gate, metrics: Metrics) -> None:
        """`page_bytes`: of a page that waits to be written."""
        self._table, self._drives = timing.table, timing.drives
        self._store, self._page_bytes, self._gate, self._metrics = store, page_bytes, gate, metrics
        self._loads = Curve()
        for nbytes, seconds in self._drives.loads if self._drives else ():
            self._loads.observe(nbytes, seconds)

    @property
    def ready(self) -> bool:
        """As batches.Pacer: nothing is held back before I/O was measured beside compute."""
        return self._table.hides

    def plan(self, loads: Sequence[int]) -> Sequence[Issue] | None:
        """As batches.Pacer."""
        try:
            return self._plan(loads)
        except Exception:
            logger.exception("tutti: the layers of a load are not spread over its forward pass")
            return None

    def issue(self, layer: int, issue: Issue) -> None:
        """As batches.Pacer: writes start when the loads have been issued, as far as the plan has room for them."""
        if issue.writes or not layer:
            self._gate.let_write(issue.writes / self._write_rate if issue.writes else 0.0)

    def loaded(self, nbytes: int, since: float) -> float:
        """So many bytes were read since then; the time now (time.monotonic())."""
        now = time.monotonic()
        if nbytes:
            self._loads.observe(nbytes, now - since)
        return now

    def _plan(self, loads: Sequence[int]) -> Sequence[Issue] | None:
        step, table = self._gate.step, self._table
        table.learn()
        if step.mode is not Mode.PREFILL or not table.measured(step.new, step.prefix):
            return None
        slack = [table.slack(step.new, step.prefix) / len(loads)] * len(loads)
        work = Work(loads, self._store.pending * self._page_bytes, slack)
        speed = Speed(self._loads.expected, self._write_rate, self._drives.sms if self._drives else ())
        issues = plan_layers(work, speed)
        self._count(work, issues)
        logger.debug("tutti: a prefill of %d tokens on %d: %s", step.new, step.prefix, explain(work, issues))
        return issues

    def _count(self, work: Work, issues: Sequence[Issue]) -> None:
        for issue in issues:
            due = sum(work.loads[issue.first : issue.first + issue.due])
            self._metrics.add("tutti_planned_bytes", due, io="due")
            self._metrics.add("tutti_planned_bytes", sum(work.loads[issue.first : issue.end]) - due, io="ahead")
            self._metrics.add("tutti_planned_bytes", issue.writes, io="write")

    @property
    def _write_rate(self) -> float:
        rate = self._store.window.write_rate or (self._drives.write if self._drives else 0.0)
        return rate if 0 < rate < math.inf else 0.0
