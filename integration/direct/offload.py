"""Pages of the device pools into the store: one thread, in the order in which SGLang offered them.

What SGLang is told is the same on all ranks: it accepts as long as not too many pages are pending, and pending ends
when SGLang takes the results, which it does for all ranks together.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tutti_sglang.integration.calls import key_bytes
from tutti_sglang.integration.direct.movers import Mover
from tutti_sglang.integration.direct.pools import DevicePool
from tutti_sglang.integration.direct.room import Place, Room
from tutti_sglang.integration.stored import Found, StoredPool

WRITE_SECONDS = 5.0
PIECE_BYTES = 8 << 20
DEPTHS_MAX = 1 << 17


@dataclass(frozen=True)
class Pages:
    """Pages of one pool: their keys and token slots."""

    pool: DevicePool
    keys: list[str]
    indices: torch.Tensor


class Offloader:
    """`room`: host memory for movers whose slots the CPU does not reach; `writes`: whether this rank stores the pool's
    pages (of replicated KV one rank does)."""

    def __init__(
        self,
        mover: Mover,
        pools: Callable[[str], StoredPool],
        writes: Callable[[DevicePool], bool],
        pending_max: int,
        report: Callable[[Exception], None],
        room: Room | None = None,
    ) -> None:
        self._mover, self._pools, self._writes, self._report, self._room = mover, pools, writes, report, room
        self._pending_max = pending_max
        self._queue: queue.SimpleQueue[tuple[list[Pages], list[Any]] | None] = queue.SimpleQueue()
        self._sizes: deque[int] = deque()
        self._results: deque[bool] = deque()
        self._pending = 0
        self._done = threading.Condition()
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="tutti-offload", daemon=True)
        self._thread.start()
        self.depths: dict[str, int] = {}

    def offer(self, parts: list[Pages], ready: Callable[[], list[Any]]) -> bool:
        """Queue them, to be read once the events of `ready` have come; False when too much is pending."""
        pages = sum(len(part.keys) for part in parts)
        if self._pending and self._pending + pages > self._pending_max:
            return False
        self._pending += pages
        self._sizes.append(pages)
        self._queue.put((parts, ready()))
        return True

    def completed(self) -> int:
        """Results that wait to be taken."""
        return len(self._results)

    def pop(self) -> bool:
        """The oldest result."""
        self._pending -= self._sizes.popleft()
        return self._results.popleft()

    def reset(self) -> None:
        """Let go of what was not begun; nothing reads the device pools when this returns, and nothing is pending."""
        self._cancelled = True
        with self._done:
            self._done.wait_for(lambda: len(self._results) == len(self._sizes))
        self._cancelled = False
        self._results.clear()
        self._sizes.clear()
        self._pending = 0

    def close(self) -> None:
        """Store what was accepted, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def note_depths(self, keys: list[str], first: int) -> None:
        """How deep these pages lie in their prefix, for eviction: SGLang does not say when it offers them."""
        if len(self.depths) > DEPTHS_MAX:
            self.depths.clear()
        self.depths.update(zip(keys, range(first, first + len(keys)), strict=True))

    def _run(self) -> None:
        while task := self._queue.get():
            stored = False
            if not self._cancelled:
                try:
                    stored = self._store(*task)
                except Exception as error:  # noqa: BLE001 - every offload completes
                    self._report(error)
            with self._done:
                self._results.append(stored)
                self._done.notify_all()

    def _store(self, parts: list[Pages], ready: list[Any]) -> bool:
        for event in ready:
            event.synchronize()
        return all(bool(self._store_part(part).all()) for part in parts if self._writes(part.pool))

    def _store_part(self, part: Pages) -> Found:
        """Whole nodes come again after a load: only what is not stored yet is moved."""
        pool, keys = self._pools(part.pool.name), key_bytes(part.keys)
        done = pool.lookup(keys)
        which = np.flatnonzero(~done)
        depth = next((self.depths[key] - at for at, key in enumerate(part.keys) if key in self.depths), 0)
        step = max(1, PIECE_BYTES // pool.view.page_bytes)
        for start in range(0, len(which), step):
            piece = which[start : start + step]
            done[piece] = self._write(part, pool, piece, depth + int(piece[0]))
            if not done[piece].all():
                break
        return done

    def _write(self, part: Pages, pool: StoredPool, which: Any, depth: int) -> Found:
        chosen = part.indices.reshape(len(part.keys), -1)[torch.from_numpy(which).to(part.indices.device)].reshape(-1)
        keys = key_bytes([part.keys[each] for each in which.tolist()])
        deadline = time.monotonic() + WRITE_SECONDS
        if self._mover.reaches:
            slots = self._mover.slots(part.pool, chosen, len(which))
            return pool.write(keys, self._mover.rows(part.pool, slots), deadline, depth)
        assert self._room is not None
        span = self._room.take(len(which), pool.view.maps[0].sizes)
        if span is None:
            return np.zeros(len(which), np.bool_)
        try:
            self._mover.take(part.pool, chosen, span.rows)
            return pool.write(keys, span.rows, deadline, depth)
        finally:
            self._room.give([Place(span, index) for index in range(len(which))])
