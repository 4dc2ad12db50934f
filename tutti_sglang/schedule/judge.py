"""Break-even in service: what was measured so far, the requests that were asked about, and the answers they got."""

import logging
import time
from bisect import bisect_right
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
        self.loads, self.fetches = Curve(), Curve()
        self._metrics, self._clock = metrics, clock
        self._chunk = chunk
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._promised = 0
        self._latest = self._latest_fetch = clock()

    def announce(self, rid: str, prefix: int, new: int) -> None:
        """A request will be looked up: `new` of its tokens after `prefix` tokens are to be computed or loaded."""
        known = self._asked.get(rid)
        if known and (known.prefix, known.new) == (prefix, new):
            return
        self._asked[rid] = Asked(prefix, new)
        while len(self._asked) > MOST:
            self._asked.popitem(last=False)

    def pages(
        self,
        rid: str | None,
        lengths: Sequence[int],
        page_tokens: int,
        page_bytes: int,
        remote: Sequence[int] = (),
    ) -> int:
        """How many pages of the request to load: one of `lengths` (what can be restored, ascending), or 0. `remote`:
        [n - 1] how many of the first n pages come from other machines."""
        self.table.learn()
        asked = self._asked.get(rid or "")
        if not lengths:
            return 0
        curves = (self.loads, self.fetches) if remote and remote[lengths[-1] - 1] else (self.loads,)
        if rid is None or asked is None or not self.table.known or all(each.count < LOADS for each in curves):
            self._promise(lengths[-1] * page_bytes)
            return self._count(lengths, lengths[-1], "unmeasured")
        if asked.pages >= 0 and self._clock() < asked.until:
            fitting = bisect_right(lengths, asked.pages)  # some of what could be restored may be gone
            return lengths[fitting - 1] if fitting else 0
        queued = self._queued()
        case = Case(lengths, page_tokens, page_bytes, asked.prefix, asked.new, queued, remote)
        decision = decide(case, self._costs())
        pages, outcome = self._probe(case, decision)
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

    def received(self, nbytes: int, seconds: float) -> None:
        """Other machines were asked for `nbytes`, and that took so long, whatever came."""
        self._latest_fetch = self._clock()
        self._promised = max(0, self._promised - nbytes)
        if seconds * RECOVERED < self.fetches.expected(nbytes) and self.fetches.count > LOADS:
            self.fetches = Curve()
        self.fetches.observe(nbytes, seconds)

    def _probe(self, case: Case, decision: Decision) -> tuple[int, str]:
        """What was decided, or a page that does not pay, after a long time without one of its kind."""
        now = self._clock()
        if not decision.pages and now - self._latest > PROBE and not case.remote_of(case.lengths[0]):
            return case.lengths[0], "probe"
        further = [pages for pages in case.lengths if pages > decision.pages and case.remote_of(pages)]
        if further and not decision.remote and now - self._latest_fetch > PROBE:
            return further[0], "probe"
        return decision.pages, decision.outcome

    def _costs(self) -> Costs:
        """What was not measured yet costs nothing, so that it will be."""

        def of(curve: Curve) -> Callable[[float], float]:
            return curve.expected if curve.count >= LOADS else lambda _: 0.0

        def recompute(new: int, prefix: int) -> float:
            return self.table.recompute(new, prefix, self._chunk)

        return Costs(of(self.loads), recompute, of(self.fetches))

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
