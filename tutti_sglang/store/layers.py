"""Some tensors of many objects at a time: what a layer-wise load reads while the layers before are computed.

The records are looked up once; the slots and files stay theirs until `close`. Each tensor is compared with its own
checksum, whose row the index vouches for by its root.
"""

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum
from tutti_sglang.engine.batch import IoClass
from tutti_sglang.engine.plan import object_addresses, tensor_addresses
from tutti_sglang.memory import Region
from tutti_sglang.store.keys import marks, some, split
from tutti_sglang.store.outcome import CHANGED, CORRUPT, EXPIRED, GOOD, LATE, UNOPENED, Codes
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.reader import TRANSIENT, Reader, Request
from tutti_sglang.store.sight import Flags, Sight, look
from tutti_sglang.store.slots import numbers_of, segments_in, segments_of
from tutti_sglang.store.space import Space
from tutti_sglang.store.straight import Begun, StraightReads
from tutti_sglang.store.target import Target, Which

Judge = Callable[[Space, bytes, Sight, Codes], None]

_FINAL = [GOOD, CORRUPT, LATE, errno.ECANCELED]
"""What becomes no better by way of the host."""


@dataclass(eq=False)
class Started:
    """A read of some tensors of the objects from `first` on, as many as `target` has rows: `which` of them come from
    the drives by `request`; `begun`: it is under way already."""

    tensors: slice
    target: Target
    first: int
    which: Which
    request: Request
    begun: Begun | None

    @property
    def objects(self) -> slice:
        """All of them."""
        return slice(self.first, self.first + len(self.target.rows))


class LayerReads:
    """Objects of one namespace that are being read by tensors. For one thread. `found`: (n,) which can be read; what a
    read did not deliver counts as not found from then on."""

    def __init__(self, parts: Parts, space: Space, keys: bytes, judge: Judge) -> None:
        """StoreError, OSError."""
        self._parts, self._space, self._keys, self._judge = parts, space, keys, judge
        self._reader, self._straight = Reader(parts, parts.verifying), StraightReads(parts)
        self._ahead: list[Started] = []
        self._held = contextlib.ExitStack()
        self._closed = False
        try:
            self._open()
        except BaseException:
            self._held.close()
            raise

    def _open(self) -> None:
        parts, space, names = self._parts, self._space, split(self._keys)
        self._read = self._held.enter_context(parts.index_drive.reading(parts.config.grace_seconds))
        entered = parts.accepted.enter(space.id, names)
        self._held.callback(parts.accepted.leave, entered)
        self._accepted = np.zeros((len(names), len(space.sizes)), dtype=np.uint64)
        if len(entered.which):
            self._accepted[entered.which] = entered.rows
        self._sight = look(parts, space, self._keys)
        wanted = self._sight.readable & ~self._accepted.any(axis=1)
        numbers = segments_of(self._sight.slots)
        self._geometries = self._held.enter_context(parts.segments.use(np.unique(numbers[wanted]).tolist()))
        self._codes = np.full(len(names), GOOD, dtype=np.int32)
        self._codes[wanted & ~np.isin(numbers, list(self._geometries))] = UNOPENED
        self._sums = np.zeros_like(self._accepted)
        self.found: Flags = np.asarray(self._accepted.any(axis=1) | (wanted & (self._codes == GOOD)))
        if parts.verifying:
            self._check_sums(np.flatnonzero(self.found & ~self._accepted.any(axis=1)))

    def _check_sums(self, which: npt.NDArray[np.int64]) -> None:
        """The rows of checksums, as far as they are those that the index vouches for."""
        slots = self._sight.slots[which]
        for segment in segments_in(slots):
            mine = which[segments_of(slots) == segment]
            within = numbers_of(self._sight.slots[mine])
            read = partial(self._parts.sums.read, segment, within, len(self._space.sizes))
            if (found := self._parts.index_drive.ask(read, None)) is None:
                self._fail(mine, LATE)
            else:
                self._sums[mine] = found
        roots = self._sight.records["root"][which] ^ marks(self._space.id, some(self._keys, which))
        self._fail(which[(checksum.roots(self._sums[which]) != roots) & self.found[which]], CORRUPT)

    def begin(self, tensors: slice, target: Target, deadline: float, first: int = 0) -> Started:
        """Start to read those tensors of the objects from `first` on, one for each row of the target, where the drives
        reach the rows; elsewhere `end` does all of it."""
        objects = slice(first, first + len(target.rows))
        which = np.flatnonzero(self.found[objects] & ~self._accepted[objects].any(axis=1))
        there = first + which
        request = Request(
            self._space,
            self._sight.slots[there],
            checksum.roots(self._sums[there][:, tensors]),
            target.rows[which],
            self._geometries,
            IoClass.DEMAND,
            deadline,
            np.arange(len(self._space.sizes))[tensors],
        )
        reached = self._straight.reach(request, padded=target.padded)
        begun = self._straight.begin(request, target, which) if reached else None
        ahead = Started(tensors, target, first, which, request, begun)
        if begun:
            self._ahead.append(ahead)
        return ahead

    def end(self, ahead: Started) -> Flags:
        """As Layers.read, of what was begun."""
        objects, sizes = ahead.objects, self._space.sizes[ahead.tensors]
        here = np.flatnonzero(self.found[objects] & self._accepted[objects].any(axis=1))
        if len(here):
            ahead.target.copy(here, self._accepted[objects][here, ahead.tensors], sizes)
        codes = self._end(ahead)
        for code in np.unique(codes[codes != GOOD]).tolist():
            self._fail(ahead.first + ahead.which[codes == code], code)
        found = self.found[objects].copy()
        self._parts.metrics.add("tutti_bytes", int(found.sum()) * int(sizes.sum()), op="read")
        return found

    def _end(self, ahead: Started) -> Codes:
        if not ahead.begun:
            return self._by_staging(ahead, np.arange(len(ahead.which)))
        self._ahead.remove(ahead)
        codes = self._straight.end(ahead.begun)
        # A device may refuse for reasons of its own what the same drive delivers to the host.
        again = np.isin(codes, TRANSIENT) if ahead.target.reached else ~np.isin(codes, _FINAL)
        if len(some := np.flatnonzero(again)):
            codes[some] = self._by_staging(ahead, some)
        return codes

    def _by_staging(self, ahead: Started, some: Which) -> Codes:
        """(k,) of these of its objects, read by way of staging, which every drive reaches."""
        request, target = ahead.request.some(some), ahead.target
        if target.reached or not len(some):
            return self._reader.read(request)
        sizes = request.sizes
        region = Region(len(some) * int(sizes.sum()))
        base = object_addresses(region.address, len(some), int(sizes.sum()))
        rows = tensor_addresses(base, sizes)
        codes = self._reader.read(request._replace(rows=rows))
        if len(good := np.flatnonzero(codes == GOOD)):
            target.copy(ahead.which[some[good]], rows[good], sizes)
        return codes

    def close(self) -> Flags:
        """Give slots and files back; (n,) whether all that was read of the object was its own. Waits for what was begun
        and did not end. Idempotent."""
        if not self._closed:
            self._closed = True
            for each in self._ahead:
                assert each.begun
                self._straight.cancel(each.begun)
            for each in [*self._ahead]:
                bad = each.first + each.which[self._end(each) != GOOD]
                self._fail(bad[self._codes[bad] == GOOD], LATE)  # the first reason counts
            self._judge_all(np.flatnonzero(~self._accepted.any(axis=1)))
            self._held.close()
        return self.found.copy()

    def _judge_all(self, which: npt.NDArray[np.int64]) -> None:
        """Of what came from the drives: a slot may have been given to another object meanwhile."""
        keys, sight = some(self._keys, which), self._sight.some(which)
        if not self._parts.verifying:
            second = self._parts.index_drive.lookup(self._space.id, keys).records
            self._fail(which[self.found[which] & (second != sight.records)], CHANGED)
        if self._read.expired(self._parts.config.grace_seconds):
            self._fail(which[self.found[which]], EXPIRED)
        self._judge(self._space, keys, sight, self._codes[which])
        self._parts.hits.hit(self._space, sight.slots[self.found[which]])

    def _fail(self, which: npt.NDArray[np.int64], code: int) -> None:
        self._codes[which] = code
        self.found[which] = False


class Layers:
    """Objects that are being read by tensors, see ObjectStore.layers. For one thread; no call raises."""

    def __init__(self, guard: Callable[..., Any], reads: LayerReads | None, objects: int) -> None:
        self._guard, self._reads = guard, reads
        self._none = np.zeros(objects, dtype=np.bool_)

    @property
    def found(self) -> Flags:
        """(n,) which objects can be read, as far as is known by now."""
        return self._reads.found.copy() if self._reads else self._none

    def read(self, tensors: slice, target: Target, deadline: float, first: int = 0) -> Flags:
        """(m,) whether those tensors of the m objects from `first` on, one for each row of the target, are where it
        wants them, as they were put. No row of it is written after this returned."""
        return self.end(self.begin(tensors, target, deadline, first), len(target.rows))

    def begin(self, tensors: slice, target: Target, deadline: float, first: int = 0) -> Started | None:
        """Start such a read, if the drives reach the rows: they may be written from now on, until `end`."""
        reads = self._reads
        return self._guard("layers", lambda: reads.begin(tensors, target, deadline, first), None) if reads else None

    def end(self, ahead: Started | None, objects: int) -> Flags:
        """As `read`, of what was begun for so many objects; None: of nothing."""
        reads, none = self._reads, np.zeros(objects, dtype=np.bool_)
        return self._guard("layers", lambda: reads.end(ahead), none) if reads and ahead else none

    def close(self) -> Flags:
        """Give the slots back; (n,) whether all that was read of the object was its own bytes. Idempotent."""
        reads = self._reads
        return self._guard("layers", reads.close, self._none, closing=True) if reads else self._none
