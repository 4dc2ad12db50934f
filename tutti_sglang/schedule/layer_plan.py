"""What I/O is issued with which layer of a prefill, so that compute hides it. Pure.

The rules of the paper's slack-aware scheduling (arXiv 2605.03375): loads come first, as many as fit into the slack of
the layer that is computed; where there is no slack a load is issued when the next layer needs it, for then the drives
are what is waited for; writes take the slack that loads leave, and what does not fit waits for another step. Loads and
writes of a step do not meet: no write comes before the last load.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

SAFE_SMS = 16
"""Of an I/O kernel whose bandwidth was not measured on this GPU: what the paper's own code gives to loads."""

MOST_SMS = 32
"""I/O never gets more: the rest computes."""

Speeds = Sequence[tuple[int, float]]
"""(SMs, bytes per second) as they were measured, in any order."""


class Issue(NamedTuple):
    """With one layer: the loads of layers `first` up to `end` (exclusive), then `writes` bytes. The first `due` of the
    loads are needed by the next layer (with layer 0 also by this one), whatever they cost. `sms`: for their kernel."""

    first: int
    end: int
    due: int
    writes: int
    sms: int


class Work(NamedTuple):
    """Of a step. `loads`: (L,) bytes of each layer that come from drives; `writes`: bytes that wait to be written;
    `slack`: (L,) seconds of each layer in which I/O costs nothing."""

    loads: Sequence[int]
    writes: int
    slack: Sequence[float]


class Speed(NamedTuple):
    """`load`: seconds for so many bytes; `write`: bytes per second, 0 where it is not known: then none is planned."""

    load: Callable[[float], float]
    write: float
    sms: Speeds = ()


def plan_layers(work: Work, speed: Speed) -> tuple[Issue, ...]:
    """(L,) what is issued when layer l is about to be computed, before its own bytes are waited for."""
    issues: list[Issue] = []
    done, writes, last = 0, work.writes, len(work.loads)
    for layer, slack in enumerate(work.slack):
        first, due, left = done, min(layer + 2, last), slack
        while done < last:
            seconds = speed.load(work.loads[done]) if done else 0.0  # nothing is computed yet that hides layer 0's
            if done >= due and seconds > left:
                break
            left -= seconds
            done += 1
        written = min(writes, int(max(0.0, left) * speed.write)) if done == last else 0
        writes -= written
        hiding = 0.0 if not first and work.loads[0] else slack
        sms = fewest_sms(sum(work.loads[first:done]) + written, hiding, speed.sms)
        issues.append(Issue(first, done, max(0, min(due, done) - first), written, sms))
    return tuple(issues)


def fewest_sms(nbytes: float, seconds: float, speeds: Speeds) -> int:
    """The fewest SMs that move `nbytes` in `seconds`; where none do, the fewest of those that are fastest. 0 for
    nothing; SAFE_SMS where nothing was measured."""
    if not nbytes:
        return 0
    measured = sorted((sms, rate) for sms, rate in speeds if 0 < sms <= MOST_SMS and rate > 0)
    if not measured:
        return SAFE_SMS
    best = max(rate for _, rate in measured)
    return next(sms for sms, rate in measured if rate >= best or rate * seconds >= nbytes)


def explain(work: Work, issues: Sequence[Issue]) -> str:
    """One line for people."""
    parts = []
    for layer, issue in enumerate(issues):
        what = [f"layers {issue.first}-{issue.end - 1}"] if issue.end > issue.first else []
        what += [f"{issue.writes} bytes written"] if issue.writes else []
        if what:
            parts.append(f"{layer}: {', '.join(what)} on {issue.sms} SMs")
    total = sum(work.slack)
    return f"{sum(work.loads)} bytes in {1e3 * total:.1f} ms of slack; with layer " + "; ".join(parts)
