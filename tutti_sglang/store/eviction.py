"""Which objects go when room is needed. Pure: `sweeper.py` applies it to a store, `benchmarks/eviction.py` to traces.

CLOCK over the slots of a namespace. A hand goes round, a window of slots at a time. Objects of the window that were not
hit since it last came are cold, and go until the window has no more of them, deeper ones first: the tail of a prefix is
worthless without its head. Only when fewer than 60 % of all objects are cold does the hand take a hit away from the
others. So 40 % of the slots belong to what is used again and again, as long as there is so much of it, however many
pages a scan writes once: they are cold from the start and make room for each other.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.store.allocation import Usage
from tutti_sglang.store.slots import Slots

HITS_MAX = 2
"""Hits that count: an object is spared so many times at most without a new one."""
COLD_SHARE = 0.6
"""Of a namespace's objects: as many cold ones are enough, and the others keep their hits."""
WINDOWS = 8
"""Per turn of the hand."""
WINDOW_MAX = 1 << 15
"""Slots: bounds the time that entering a window takes."""
HALF_LIFE = 3600.0
"""Seconds after which a hit counts half when namespaces are compared."""
IDLE_SECONDS = 1800.0
"""After so long without a hit or a write nobody works with a namespace."""

Hits = npt.NDArray[np.uint8]
"""(n,) hits of each slot since the hand passed, at most HITS_MAX."""
Mask = npt.NDArray[np.bool_]


def window_size(slots: int) -> int:
    """Slots the hand looks at together, in a namespace of so many."""
    return max(1, min(WINDOW_MAX, math.ceil(slots / WINDOWS)))


def aged(hits: Hits, objects: int, hot: int) -> Hits:
    """(n,) the hits of a window after the hand has entered it, in a namespace of so many `objects`, of which `hot` have
    hits. All of them decide: where a window lies must not."""
    if objects - hot >= COLD_SHARE * objects:
        return hits
    return np.where(hits > 0, hits - 1, 0).astype(np.uint8)


def order(slots: Slots, depths: npt.NDArray[np.integer], hot: Slots, group: int) -> npt.NDArray[np.int64]:
    """(n,) the cold `slots` of a window in the order in which they go; `hot`: its other objects.

    Whole groups go first, so that what is written into them lies side by side, those with the deepest heads before
    others; then single slots, the deepest first.
    """
    groups = slots // group
    mixed = np.isin(groups, hot // group)
    _, which = np.unique(groups, return_inverse=True)
    head = np.full(which.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(head, which, depths.astype(np.int64))
    depth_of_unit = np.where(mixed, depths.astype(np.int64), head[which])
    return np.asarray(np.lexsort((slots, -depths.astype(np.int64), groups, -depth_of_unit, mixed)))


class Sweep:
    """The cold objects of a window, while the hand is there. `slots`: (n,) as given."""

    def __init__(self, slots: Slots, depths: npt.NDArray[np.integer], hot: Slots, group: int) -> None:
        self.slots = slots
        self._left = order(slots, depths, hot, group)

    def __len__(self) -> int:
        """Objects that may still go."""
        return len(self._left)

    def take(self, count: int, hits: Hits) -> npt.NDArray[np.int64]:
        """(≤ count,) which of `slots` go next. `hits`: (n,) now; what was hit since the hand came is spared."""
        cold = np.flatnonzero(hits[self._left] == 0)[:count]
        chosen = self._left[cold]
        self._left = self._left[cold[-1] + 1 :] if len(cold) == count > 0 else self._left[:0]
        return np.asarray(chosen)


def surplus(usage: Usage, low: float, high: float) -> int:
    """Objects to evict so that a put need not: none up to the `high` watermark, beyond it as many as lead to `low`.
    Leased slots are free: somebody is about to put. In few slots the high watermark is all of them: a free one would
    cost more than it saves."""
    return usage.used - math.floor(low * usage.slots) if usage.used > math.ceil(high * usage.slots) else 0


class Share(NamedTuple):
    """What a namespace has. `size`: bytes of its segments; `heat`: bytes hit, each counted half per HALF_LIFE; `idle`:
    seconds since it was last hit or written to."""

    namespace: int
    size: int
    heat: float = 0.0
    idle: float = 0.0

    @property
    def density(self) -> float:
        """Hit bytes per byte of room."""
        return self.heat / self.size if self.size else 0.0

    @property
    def used(self) -> bool:
        """Whether anybody works with it."""
        return self.idle < IDLE_SECONDS


def cooled(heat: float, seconds: float) -> float:
    """Heat after some time without hits."""
    return heat * math.exp2(-max(0.0, seconds) / HALF_LIFE)


def donor(shares: Sequence[Share], taker: int, segment: int) -> int | None:
    """The namespace that gives a segment to `taker`, which needs room in a full store; None: it evicts its own objects.

    `segment`: bytes that move. The fair share is the store divided by the namespaces in use. Up to half of it a taker
    is given room by whoever keeps the whole of it; beyond, only by one whose room brings less than half as many hits
    as the taker's and that keeps half of it. One that nobody uses gives all, and who has nothing gets a segment from
    anybody. The least dense gives first. Heats that stay, and the segments come to rest.
    """
    me = next((share for share in shares if share.namespace == taker), Share(taker, 0))
    others = [share for share in shares if share.namespace != taker and share.size >= segment]
    fair = sum(share.size for share in shares) / (1 + sum(share.used for share in others))
    needy = me.size + segment <= fair / 2
    givers = [
        share
        for share in others
        if not share.used
        or (needy and share.size - segment >= fair)
        or (share.density * 2 < me.density and share.size - segment >= fair / 2)
    ]
    if me.size < segment and not givers:
        givers = [share for share in others if share.size >= 2 * segment] or others
    return min(givers, key=lambda share: (share.used, share.density, -share.size)).namespace if givers else None
