"""A get: from staging what was accepted here, the rest from the drives between two looks into the index, and what is
not here from the fleet."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang import memory
from tutti_sglang.checksum import Sums
from tutti_sglang.engine.batch import IoClass
from tutti_sglang.memory import Addresses
from tutti_sglang.store.keys import marks, some, split
from tutti_sglang.store.outcome import CHANGED, CORRUPT, EXPIRED, GOOD, LATE, PERMANENT, UNANSWERED, UNOPENED, Codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.reader import Reader, Request
from tutti_sglang.store.remembered import Recalled, Remembered
from tutti_sglang.store.sight import Flags, Sight, look
from tutti_sglang.store.slots import Slots, segments_in, segments_of
from tutti_sglang.store.space import Space

Which = npt.NDArray[np.int64]
When = tuple[float, IoClass]
"""Deadline and class."""

Way = Callable[[Space, bytes, Addresses, When], Flags]
"""(n,) which objects were brought into their rows."""

Beyond = Callable[[Space, bytes, Addresses, float], Flags]
"""(n,) which objects came from elsewhere into their rows, until the deadline."""

_REASONS = {CORRUPT: "checksum", CHANGED: "changed", EXPIRED: "grace", LATE: "deadline", UNANSWERED: "deadline"}
_NOT_THE_OBJECT = frozenset([CHANGED, EXPIRED, LATE])


class Seen(NamedTuple):
    """(m,) which of some keys can be read, in which slots, with which roots. `state`: as of Request."""

    which: Which
    slots: Slots
    roots: Sums
    state: bytes | None = None


class Getter:
    """Thread safe."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._reader = Reader(parts, parts.verifying)
        self._remembered = Remembered()
        self._beyond: Beyond | None = None
        self._used: Callable[[Space, bytes], None] = lambda *_: None

    def join(self, beyond: Beyond, used: Callable[[Space, bytes], None]) -> None:
        """From now on what is not here is asked for `beyond`, and who shares it is told what was `used`."""
        self._beyond, self._used = beyond, used

    def get(self, space: Space, keys: bytes, rows: Addresses, deadline: float, klass: IoClass) -> Flags:
        """(n,) whether the object's bytes are in its rows; rows of the others hold anything. StoreError, OSError."""
        ways = self._at_once, self._from_drives
        good, staged = self._fetch(space, keys, rows, (deadline, klass), ways)
        self._count(space, good, staged)
        if self._beyond:
            here, rest = np.flatnonzero(good), np.flatnonzero(~good)
            self._used(space, some(keys, here))
            if len(rest):
                good[rest] = self._beyond(space, some(keys, rest), rows[rest], deadline)
        return good

    def fetch(self, space: Space, keys: bytes, rows: Addresses, when: When) -> Flags:
        """As `get`, of what is here, for nobody's request. StoreError, OSError."""
        return self._fetch(space, keys, rows, when, [self._from_drives])[0]

    def _fetch(self, space: Space, keys: bytes, rows: Addresses, when: When, ways: Sequence[Way]) -> tuple[Flags, int]:
        """And how many came from staging."""
        names = split(keys)
        good = np.zeros(len(names), dtype=np.bool_)
        entered = self._parts.accepted.enter(space.id, names)
        try:
            if len(entered.which):
                start = time.monotonic()
                memory.copy_rows(rows[entered.which], entered.rows, space.sizes)
                self._parts.metrics.observe("tutti_wait_seconds", time.monotonic() - start, phase="copy")
                good[entered.which] = True
        finally:
            self._parts.accepted.leave(entered)
        for way in ways:
            rest = np.flatnonzero(~good)
            if len(rest) == len(good):
                good = way(space, keys, rows, when)
            elif len(rest):
                good[rest] = way(space, some(keys, rest), rows[rest], when)
        return good, len(entered.which)

    def expect(self, space: Space, keys: bytes) -> None:
        """A lookup that gets may follow."""
        self._remembered.expect(space.id, keys)

    def forget(self) -> None:
        """What was remembered and read ahead: it was removed."""
        self._remembered.forget()
        self._reader.ahead.forget()

    def tidy(self) -> None:
        """Give up what was read ahead and not asked for. To be called now and then."""
        self._reader.ahead.tidy()

    def _at_once(self, space: Space, keys: bytes, rows: Addresses, when: When) -> Flags:
        """(n,) whether the object is in its rows, where the look of a moment ago saw it.

        Nothing keeps its slot from being reused meanwhile, and nobody looks again. It is the checksum that says so: the
        root is bound to namespace and key, so bytes that have it are those that were put. Without checksums it is the
        state of the index: no slot gets another owner without a commit. What fails is asked for again, by the book.
        """
        good = np.zeros(len(rows), dtype=np.bool_)
        recalled = self._recall(space, keys)
        if recalled is None or not recalled.sight.readable.any():
            return good
        sight = recalled.sight
        which, slots, roots, _ = _seen(space, keys, sight)
        then = _seen(space, recalled.following, recalled.after)
        then = then._replace(state=None if self._parts.verifying else recalled.state)
        mine = rows if len(which) == len(rows) else rows[which]
        good[which] = self._read(space, slots, roots, mine, when, then) == GOOD
        if not self._current(recalled):
            good[:] = False
        self._parts.hits.hit(space, sight.slots[good])
        return good

    def _recall(self, space: Space, keys: bytes) -> Recalled | None:
        """What is remembered of these keys; a look, once for many batches, where they belong to a request."""
        recalled = self._remembered.recall(space.id, keys)
        if recalled and not self._current(recalled):
            recalled = None
        known = len(keys) + len(recalled.following) if recalled else 0
        if known < 2 * len(keys) and len(stretch := self._remembered.stretch(space.id, keys)) > known:
            state = self._parts.index.state()
            self._remembered.add(space.id, stretch, look(self._parts, space, stretch), state)
            recalled = self._remembered.recall(space.id, keys)
        return recalled

    def _current(self, recalled: Recalled) -> bool:
        """Whether what was seen there can be relied on now, or will be compared anyway."""
        if self._parts.verifying:
            return True
        return recalled.state is not None and recalled.state == self._parts.index.state()

    def _from_drives(self, space: Space, keys: bytes, rows: Addresses, when: When) -> Flags:
        parts, grace = self._parts, self._parts.config.grace_seconds
        with parts.index_drive.reading(grace) as read:
            first = look(parts, space, keys)
            which, slots, roots, _ = _seen(space, keys, first)
            found = np.full(len(first.records), GOOD, dtype=np.int32)
            if len(which):
                found[which] = self._read(space, slots, roots, rows[which], when)
                # A slot may have been given to another object between the look and the read.
                second = parts.index_drive.lookup(space.id, keys).records
                found[which[second[which] != first.records[which]]] = CHANGED
            if read.expired(grace):
                found[which] = EXPIRED
        self.judge(space, keys, first, found)
        good = np.asarray(first.readable & (found == GOOD))
        parts.hits.hit(space, first.slots[good])
        return good

    def _read(
        self, space: Space, slots: Slots, roots: Sums, rows: Addresses, when: When, then: Seen | None = None
    ) -> Codes:
        """`then`: what may be asked for next."""
        found, (deadline, klass) = np.full(len(slots), UNOPENED, dtype=np.int32), when
        every = slots if then is None else np.concatenate([slots, then.slots])
        segments = segments_in(every)
        with self._parts.segments.use(segments, until=deadline) as geometries:
            state = None if then is None else then.state
            whole = Request(space, slots, roots, rows, geometries, klass, deadline, state=state)
            opened = (
                np.isin(segments_of(every), list(geometries))
                if len(geometries) < len(segments)
                else np.ones(len(every), np.bool_)
            )
            mine, after = opened[: len(slots)], None
            if then is not None and len(then.slots) and opened[len(slots) :].all():
                after = whole._replace(slots=then.slots, roots=then.roots, klass=IoClass.PRELOAD)
            found[mine] = self._reader.read(whole if mine.all() else whole.some(np.flatnonzero(mine)), after)
        if time.monotonic() >= deadline:  # the file may have opened a moment later
            found[found == UNOPENED] = LATE
        return found

    def judge(self, space: Space, keys: bytes, sight: Sight, found: Codes) -> None:
        """Count what was not delivered, and stop claiming it: for good where it is spoiled, for a while where a drive
        failed."""
        self._parts.metrics.add("tutti_missed_objects", int((~sight.readable).sum()), reason="absent")
        if not found.any():
            return
        names = split(keys)
        for code in np.unique(found[found != GOOD]).tolist():
            which = np.flatnonzero(found == code)
            self._parts.metrics.add("tutti_missed_objects", len(which), reason=_REASONS.get(code, "io"))
            mine = [names[each] for each in which.tolist()]
            if code in PERMANENT:
                self._parts.doubts.condemn(space.id, mine, sight.slots[which])
            elif code not in _NOT_THE_OBJECT:
                self._parts.doubts.hide(space.id, mine)
        if (found == CORRUPT).any():
            self._parts.ledger.corrupt(int((found == CORRUPT).sum()))

    def _count(self, space: Space, good: Flags, staged: int) -> None:
        delivered = int(good.sum())
        self._parts.metrics.add("tutti_hit_objects", staged, tier="staging")
        self._parts.metrics.add("tutti_hit_objects", delivered - staged, tier="drive")
        self._parts.metrics.add("tutti_bytes", delivered * space.payload, op="read")


def _seen(space: Space, keys: bytes, sight: Sight) -> Seen:
    which = np.flatnonzero(sight.readable)
    mine = keys if len(which) == len(sight.readable) else some(keys, which)
    return Seen(which, sight.slots[which], sight.records["root"][which] ^ marks(space.id, mine))
