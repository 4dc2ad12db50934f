"""Load or recompute: how much of a stored prefix makes a request start sooner, by what was measured. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

MARGIN = 0.05
"""Loading everything may cost so much more than the best choice and is still chosen: it leaves the GPU to others."""

CANDIDATES = 16
"""Lengths that are tried, of many."""


class Case(NamedTuple):
    """A request before its prefix is loaded.

    `lengths`: pages that can be restored, ascending; `page_tokens`, `page_bytes`: of one page; `prefix`: tokens before
    them that the GPU or the host has already; `new`: tokens after `prefix`; `queued`: bytes that are loaded first.
    """

    lengths: Sequence[int]
    page_tokens: int
    page_bytes: int
    prefix: int
    new: int
    queued: int = 0


class Costs(NamedTuple):
    """`load`: seconds for so many bytes; `recompute`: seconds for (new, prefix) tokens."""

    load: Callable[[float], float]
    recompute: Callable[[int, int], float]


class Decision(NamedTuple):
    """`pages` are loaded. Seconds until the prompt is computed: so, with all pages loaded, with none."""

    pages: int
    best: float
    loading: float
    recomputing: float

    @property
    def outcome(self) -> str:
        """In one word: for metrics."""
        if not self.pages:
            return "recompute"
        return "load" if self.best == self.loading else "part"

    def explain(self) -> str:
        """In one line, for people."""
        return (
            f"{self.pages} pages: {1e3 * self.best:.1f} ms (all of them {1e3 * self.loading:.1f} ms, "
            f"none {1e3 * self.recomputing:.1f} ms)"
        )


def decide(case: Case, costs: Costs) -> Decision:
    """The number of pages, one of `lengths` or 0, with which the prompt is computed soonest."""
    assert case.lengths

    def seconds(pages: int) -> float:
        tokens = min(pages * case.page_tokens, case.new)
        load = costs.load(case.queued + pages * case.page_bytes) if pages else 0.0
        return load + costs.recompute(case.new - tokens, case.prefix + tokens)

    everything = case.lengths[-1]
    tried = {pages: seconds(pages) for pages in (0, *_some(case.lengths))}
    best = min(tried, key=lambda pages: (tried[pages], -pages))
    if tried[everything] <= (1 + MARGIN) * tried[best]:
        best = everything
    return Decision(best, tried[best], tried[everything], tried[0])


def shortest_that_pays(costs: Costs, page_tokens: int, page_bytes: int, longest: int = 1 << 20) -> int:
    """Tokens of the shortest whole prompt, in powers of two pages, that is loaded sooner than computed; 0: none up to
    `longest`."""
    pages = 1
    while pages * page_tokens <= longest:
        if costs.load(pages * page_bytes) < costs.recompute(pages * page_tokens, 0):
            return pages * page_tokens
        pages *= 2
    return 0


def _some(lengths: Sequence[int]) -> list[int]:
    """At most CANDIDATES of them, evenly, the longest included."""
    step = -(-len(lengths) // CANDIDATES)
    return list(lengths[::-1][::step])
