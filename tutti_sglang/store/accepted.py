"""Objects that were accepted and are not on a drive yet: they lie in staging, and this process serves them from
there."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tutti_sglang.checksum import Sums
from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import Ticket
from tutti_sglang.engine.staging import Extent, Staging
from tutti_sglang.memory import Addresses

SHARE = 0.75
"""Of staging that accepted objects may fill, so that reads always find room."""


@dataclass(eq=False)
class Parcel:
    """The objects of one put in one extent; (n, T) `rows`: where their tensors lie. `users`: the writer and the readers
    that copy out of it now; `since`: time.monotonic() when they came."""

    namespace: int
    keys: list[bytes]
    rows: Addresses
    sums: Sums
    depth: npt.NDArray[np.uint32]
    extent: Extent
    users: int = 1
    since: float = field(default_factory=time.monotonic)
    dropped: set[int] = field(default_factory=set)
    owed: tuple[Engine, Ticket] | None = None


@dataclass(frozen=True)
class Cargo:
    """n objects out of several parcels of one namespace; all arrays are (n,), `rows` and `sums` (n, T)."""

    parcels: list[Parcel]
    owner: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    keys: list[bytes]
    rows: Addresses
    sums: Sums
    depth: npt.NDArray[np.uint32]

    @staticmethod
    def of(parcels: list[Parcel]) -> "Cargo":
        """All that is in the parcels and was not dropped."""
        whole = Cargo(
            parcels,
            np.repeat(np.arange(len(parcels)), [len(each.keys) for each in parcels]),
            np.concatenate([np.arange(len(each.keys)) for each in parcels]),
            [key for each in parcels for key in each.keys],
            np.concatenate([each.rows for each in parcels]),
            np.concatenate([each.sums for each in parcels]),
            np.concatenate([each.depth for each in parcels]),
        )
        return whole.some(np.flatnonzero(whole.wanted()))

    def some(self, which: npt.NDArray[np.int64]) -> "Cargo":
        """Those objects only."""
        keys = [self.keys[each] for each in which.tolist()]
        owner, position = self.owner[which], self.position[which]
        return Cargo(self.parcels, owner, position, keys, self.rows[which], self.sums[which], self.depth[which])

    def wanted(self) -> npt.NDArray[np.bool_]:
        """(n,) False for what was dropped meanwhile."""
        wanted = np.ones(len(self.keys), dtype=np.bool_)
        for number, parcel in enumerate(self.parcels):
            if parcel.dropped:
                wanted &= ~((self.owner == number) & np.isin(self.position, list(parcel.dropped)))
        return wanted


@dataclass(frozen=True, slots=True)
class Found:
    """`which`: (m,) positions in the request that were found; `rows`: (m, T) where their tensors lie. Hand it to
    `leave`."""

    which: npt.NDArray[np.int64]
    rows: Addresses
    parcels: list[Parcel]


class Accepted:
    """Thread safe. A parcel is queued by `add`, taken by the writer with `take`, and ends with `finish`."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._budget = int(SHARE * staging.size)
        self._bytes = 0
        self._map: dict[tuple[int, bytes], tuple[Parcel, int]] = {}
        self._queue: deque[Parcel] = deque()
        self._open = self._awaited = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._map)

    @property
    def open(self) -> int:
        """Parcels that are queued or being written."""
        return self._open

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for parcels to be written."""
        return self._awaited > 0

    @property
    def size(self) -> int:
        """Bytes of staging that accepted objects fill."""
        return self._bytes

    def contains(self, namespace: int, keys: list[bytes]) -> npt.NDArray[np.bool_]:
        """(n,) which keys are accepted."""
        known = self._map
        if not known:
            return np.zeros(len(keys), dtype=np.bool_)
        return np.fromiter(((namespace, key) in known for key in keys), dtype=np.bool_, count=len(keys))

    def enter(self, namespace: int, keys: list[bytes]) -> Found:
        """Those of `keys` that are accepted; their memory stays until `leave`."""
        which, rows, parcels = [], [], set()
        if self._map:
            with self._changed:
                for position, key in enumerate(keys):
                    entry = self._map.get((namespace, key))
                    if entry:
                        which.append(position)
                        rows.append(entry[0].rows[entry[1]])
                        parcels.add(entry[0])
                for parcel in parcels:
                    parcel.users += 1
        return Found(np.array(which, dtype=np.int64), np.array(rows, dtype=np.uint64), list(parcels))

    def leave(self, found: Found) -> None:
        """The caller is done with the memory."""
        self._unuse(found.parcels)

    def room(self, nbytes: int, deadline: float) -> Extent | None:
        """Staging for objects to be accepted; waits until `deadline`. None when there is none. Give it to `add` or
        `refund`."""
        if not self._wait(lambda: self._bytes + nbytes <= self._budget, deadline, take=nbytes):
            return None
        extent = self._staging.wait(nbytes, deadline)
        if extent is None:
            self._credit(nbytes)
        elif extent.size != nbytes:
            self._credit(nbytes - extent.size)
        return extent

    def refund(self, extent: Extent) -> None:
        """`room` was not needed after all."""
        self._staging.release(extent)
        self._credit(extent.size)

    def add(self, parcels: list[Parcel]) -> None:
        """Serve the objects from now on and queue them for the writer, all at once: it should not start with the first.
        A key that somebody else accepted meanwhile is left to him."""
        with self._changed:
            for parcel in parcels:
                for position, key in enumerate(parcel.keys):
                    mine = (parcel, position)
                    if self._map.setdefault((parcel.namespace, key), mine) is not mine:
                        parcel.dropped.add(position)
            self._queue.extend(parcels)
            self._open += len(parcels)
            self._changed.notify_all()

    def oldest(self, timeout: float) -> float | None:
        """Since when the oldest queued parcel is there; waits at most `timeout` seconds for one."""
        with self._changed:
            if not self._queue and timeout > 0:
                self._changed.wait(timeout)
            return self._queue[0].since if self._queue else None

    def take(self, nbytes: int) -> list[Parcel]:
        """Queued parcels, oldest first, of about `nbytes`."""
        taken: list[Parcel] = []
        with self._changed:
            while self._queue and (not taken or nbytes >= self._queue[0].extent.size):
                nbytes -= self._queue[0].extent.size
                taken.append(self._queue.popleft())
        return taken

    def finish(self, parcels: list[Parcel], engine: Engine, owed: Mapping[int, Ticket]) -> None:
        """The writer is done with the parcels: their objects are in the index now, or lost. `owed`: parcel → what the
        engine has not answered of it, and keeps the memory for. All at once: who waits for room is to find much."""
        with self._changed:
            for number, parcel in enumerate(parcels):
                self._withdraw(parcel)
                if number in owed:
                    parcel.owed = (engine, owed[number])
            self._open -= len(parcels)
        self._unuse(parcels)

    def clear(self, namespace: int) -> int:
        """Drop the namespace's accepted objects; the writer skips them. How many."""
        with self._changed:
            gone = [entry for entry in self._map.items() if entry[0][0] == namespace]
            for name, (parcel, position) in gone:
                parcel.dropped.add(position)
                del self._map[name]
        return len(gone)

    def drain(self, deadline: float) -> bool:
        """Wait until nothing is queued or being written; False at the deadline."""
        return self._wait(lambda: not self._open, deadline)

    def wake(self) -> None:
        """Let `take` and `room` look again."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], deadline: float, take: int = 0) -> bool:
        """Until what the writer does makes it true; then `take` bytes of the budget are the caller's."""
        with self._changed:
            self._awaited += 1
            try:
                done = self._changed.wait_for(condition, max(0.0, deadline - time.monotonic()))
            finally:
                self._awaited -= 1
            self._bytes += take if done else 0
            return done

    def _withdraw(self, parcel: Parcel) -> None:
        for key in parcel.keys:
            entry = self._map.get((parcel.namespace, key))
            if entry is not None and entry[0] is parcel:
                del self._map[parcel.namespace, key]

    def _unuse(self, parcels: list[Parcel]) -> None:
        with self._changed:
            for parcel in parcels:
                parcel.users -= 1
            last = [parcel for parcel in parcels if not parcel.users]
        for parcel in last:
            if parcel.owed:
                self._staging.quarantine(parcel.extent, *parcel.owed)
            else:
                self._staging.release(parcel.extent)
        self._credit(sum(parcel.extent.size for parcel in last))

    def _credit(self, nbytes: int) -> None:
        with self._changed:
            self._bytes -= nbytes
            self._changed.notify_all()
