"""Break-even in service: what was measured so far, the requests that were asked about, and the answers they got."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tutti_sglang.metrics import Metrics
from tutti_sglang.schedule.break_even import Case, Costs, Decision, decide, shortest_that_pays
from tutti_sglang.schedule.slack import Curve, Table

logger = logging.getLogger(__name__)

REMEMBERED = 2.0
"""Seconds in which a request gets the same answer: SGLang asks up to 8 times for one that was told of no hit."""

LOADS = 3
"""Loads that were seen, below which everything is loaded."""

PROBE = 30.0
"""Seconds without a load after which one page is loaded although it does not pay: the drives may be faster now."""

RECOVERED = 2.0
"""A load so many times faster than expected: what is known of other sizes is out of date."""

FORGET = 2.0
"""Seconds after which what was promised and not loaded is not waited for any more."""

MOST = 4096


class Asked(NamedTuple):
    """A request: tokens that are there before the stored ones, tokens after these, and what was answered until when."""

    prefix: int
    new: int
    pages: int = -1
    until: float = 0.0


class Judge:
    """Of one rank. Requests are announced by the scheduler thread, judged by the thread that looks them up."""

    def __init__(
        self,
        table: Table,
        metrics: Metrics,
        chunk: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunk`: most tokens of a prefill step, 0: no limit."""
        self.table = table
        self.loads = Curve()
        self._metrics, self._clock = metrics, clock
        self._chunk = chunk
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._promised = 0
        self._latest = clock()

    def announce(self, rid: str, prefix: int, new: int) -> None:
        """A request will be looked up: `new` of its tokens after `prefix` tokens are to be computed or loaded."""
        known = self._asked.get(rid)
        if known and (known.prefix, known.new) == (prefix, new):
            return
        self._asked[rid] = Asked(prefix, new)
        while len(self._asked) > MOST:
            self._asked.popitem(last=False)

    def pages(self, rid: str | None, lengths: Sequence[int], page_tokens: int, page_bytes: int) -> int:
        """How many pages of the request to load: one of `lengths` (what can be restored, ascending), or 0."""
        self.table.learn()
        asked = self._asked.get(rid or "")
        if not lengths:
            return 0
        if rid is None or asked is None or self.loads.count < LOADS or not self.table.known:
            self._promise(lengths[-1] * page_bytes)
            return self._count(lengths, lengths[-1], "unmeasured")
        if asked.pages >= 0 and self._clock() < asked.until:
            return min(asked.pages, lengths[-1])
        queued = self._queued()
        case = Case(lengths, page_tokens, page_bytes, asked.prefix, asked.new, queued)
        decision = decide(case, self._costs())
        pages, outcome = decision.pages, decision.outcome
        if not pages and self._clock() - self._latest > PROBE:
            pages, outcome = lengths[0], "probe"
        self._asked[rid] = asked._replace(pages=pages, until=self._clock() + REMEMBERED)
        self._promise(pages * page_bytes)
        self._show(rid, case, decision, outcome)
        return self._count(lengths, pages, outcome)

    def measured(self, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` took so long in a profile."""
        self.loads.observe(nbytes, seconds)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` took so long."""
        self._latest = self._clock()
        self._promised = max(0, self._promised - nbytes)
        if seconds * RECOVERED < self.loads.expected(nbytes) and self.loads.count > LOADS:
            self.loads = Curve()
        self.loads.observe(nbytes, seconds)

    def _costs(self) -> Costs:
        return Costs(self.loads.expected, lambda new, prefix: self.table.recompute(new, prefix, self._chunk))

    def _promise(self, nbytes: int) -> None:
        self._promised = self._queued() + nbytes
        if nbytes:
            self._latest = self._clock()

    def _queued(self) -> int:
        """Bytes that earlier requests were promised and that are still to come."""
        return self._promised if self._clock() - self._latest < FORGET else 0

    def _count(self, lengths: Sequence[int], pages: int, outcome: str) -> int:
        self._metrics.add("tutti_break_even_requests", outcome=outcome)
        self._metrics.add("tutti_declined_objects", lengths[-1] - pages)
        return pages

    def _show(self, rid: str, case: Case, decision: Decision, outcome: str) -> None:
        shortest = shortest_that_pays(self._costs(), case.page_tokens, case.page_bytes)
        self._metrics.set("tutti_break_even_tokens", shortest)
        logger.debug(
            "tutti: break-even of %s: %s: %s, of %d stored, for %d tokens on %d, %d bytes queued",
            rid,
            outcome,
            decision.explain(),
            case.lengths[-1],
            case.new,
            case.prefix,
            case.queued,
        )
