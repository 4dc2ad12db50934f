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
    them that the GPU or the host has already; `new`: tokens after `prefix`; `queued`: bytes that are loaded first;
    `remote`: [n - 1] how many of the first n pages come from other machines, empty for none.
    """

    lengths: Sequence[int]
    page_tokens: int
    page_bytes: int
    prefix: int
    new: int
    queued: int = 0
    remote: Sequence[int] = ()

    def remote_of(self, pages: int) -> int:
        """How many of so many pages come from other machines."""
        return self.remote[pages - 1] if pages and self.remote else 0

    @property
    def local(self) -> int:
        """The longest length that needs no other machine; 0 where there is none."""
        return max((pages for pages in self.lengths if not self.remote_of(pages)), default=0)


class Costs(NamedTuple):
    """Seconds: `load`: for so many bytes from the drives; `recompute`: for (new, prefix) tokens; `fetch`: for so many
    bytes from other machines."""

    load: Callable[[float], float]
    recompute: Callable[[int, int], float]
    fetch: Callable[[float], float] = lambda _: 0.0


class Decision(NamedTuple):
    """`pages` are loaded, `remote` of them from other machines. Seconds until the prompt is computed: so, with all
    pages, with none, with what needs no other machine."""

    pages: int
    best: float
    loading: float
    recomputing: float
    remote: int = 0
    local: float = 0.0

    @property
    def outcome(self) -> str:
        """In one word: for metrics."""
        if not self.pages:
            return "recompute"
        if self.remote:
            return "peer"
        return "load" if self.best == self.loading else "part"

    def explain(self) -> str:
        """In one line, for people."""
        return (
            f"{self.pages} pages: {1e3 * self.best:.1f} ms (all of them {1e3 * self.loading:.1f} ms, "
            f"none {1e3 * self.recomputing:.1f} ms, without other machines {1e3 * self.local:.1f} ms)"
        )


def decide(case: Case, costs: Costs) -> Decision:
    """The number of pages, one of `lengths` or 0, with which the prompt is computed soonest."""
    assert case.lengths

    def seconds(pages: int) -> float:
        tokens = min(pages * case.page_tokens, case.new)
        remote = case.remote_of(pages)
        local = pages - remote
        load = costs.load(case.queued + local * case.page_bytes) if local else 0.0
        load += costs.fetch(remote * case.page_bytes) if remote else 0.0
        return load + costs.recompute(case.new - tokens, case.prefix + tokens)

    everything = case.lengths[-1]
    tried = {pages: seconds(pages) for pages in (0, case.local, *_some(case.lengths))}
    best = min(tried, key=lambda pages: (tried[pages], -pages))
    if tried[everything] <= (1 + MARGIN) * tried[best]:
        best = everything
    return Decision(best, tried[best], tried[everything], tried[0], case.remote_of(best), tried[case.local])


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
