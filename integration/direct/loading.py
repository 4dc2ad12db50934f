"""Layer by layer into device slots, in step with the forward pass: what was staged is copied, the rest is read.

A batch holds the loads of all requests that are admitted together; layer l of all their pages is moved as one. Where
the drives are read beside compute, the batch's plan says when; elsewhere all is read as soon as it can be.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tutti_sglang.integration.direct.batches import Batch, Load, Part
from tutti_sglang.integration.direct.movers import Mover, Read, Reads, Slots, Source
from tutti_sglang.integration.direct.pacing import Pacing
from tutti_sglang.integration.direct.pools import DevicePool
from tutti_sglang.integration.direct.room import Place
from tutti_sglang.metrics import Metrics

LAYER_SECONDS = 60.0
"""A layer that takes longer has failed; until then nobody gives up what a drive may still deliver."""


@dataclass(frozen=True)
class _Copy:
    """Pages of a pool whose tensors lie in host memory."""

    pool: DevicePool
    slots: Slots
    source: Source
    pages: int


class _Begun(NamedTuple):
    """The reads of a layer, which were begun `at` that time (time.monotonic()); `ends` them, as Reads.end."""

    at: float
    ends: list[Callable[[], bool]]


class Loader:
    """Moves batches: on the caller's thread where that only enqueues, else on a thread of its own, one after the
    other. `free`: gives pages back to the room; `pacing`: None reads everything as soon as it can be."""

    def __init__(
        self,
        mover: Mover,
        layers: int,
        free: Callable[[list[Place]], None],
        metrics: Metrics,
        report: Callable[[Exception], None],
        pacing: Pacing | None = None,
    ) -> None:
        self._mover, self._layers, self._free, self._metrics, self._report = mover, layers, free, metrics, report
        self._pacing = pacing
        self._queue: queue.SimpleQueue[tuple[Batch, list[_Copy], list[Read]] | None] = queue.SimpleQueue()
        self._ending: list[Batch] = []
        self._thread = threading.Thread(target=self._run, name="tutti-load", daemon=True)
        self._thread.start()

    def start(self, loads: list[Load]) -> Batch:
        """On the scheduler thread, before the forward pass is launched."""
        self.sweep()
        batch = Batch(loads, self._layers)
        try:
            self._start(batch)
        except Exception as error:  # noqa: BLE001 - `finish` tells, and SGLang computes or aborts
            self._report(error)
            batch.fail()
        return batch

    def _start(self, batch: Batch) -> None:
        self._mover.begin()
        copies, reads = self._plan(batch.loads)
        self._metrics.add("tutti_load_pages", sum(each.pages for each in copies), source="staged")
        self._metrics.add("tutti_load_pages", sum(each.pages for each in reads), source="drive")
        if reads and self._pacing and self._pacing.ready:
            batch.pace(self._pacing, [sum(_bytes(read, layer) for read in reads) for layer in range(self._layers)])
        if self._mover.asynchronous and not reads:
            self._move(batch, copies, reads)
        else:
            self._queue.put((batch, copies, reads))

    def finish(self, batch: Batch) -> bool:
        """Wait until no drive can write to a slot any more; whether all came. Copies on a stream are not waited for."""
        batch.wait_until(self._layers - 1)
        self._metrics.add("tutti_load_wait_seconds", batch.waited)
        outcome = "failed" if batch.failed else "loaded"
        self._metrics.add("tutti_load_requests", len(batch.loads), outcome=outcome)
        self._ending.append(batch)
        self.sweep()
        return not batch.failed

    def sweep(self, wait: bool = False) -> None:
        """Give back the host memory of batches that are over. `wait`: of all."""
        while wait and not all(batch.is_over() for batch in self._ending):
            time.sleep(0.001)
        for batch in [each for each in self._ending if each.is_over()]:
            self._ending.remove(batch)
            for load in batch.loads:
                self.release(load)

    def release(self, load: Load) -> None:
        """The load is over, or will not be."""
        load.held.close()
        self._free([place for part in load.parts for place in part.places if place])

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()
        self.sweep(wait=True)

    def _plan(self, loads: list[Load]) -> tuple[list[_Copy], list[Read]]:
        copies, reads = [], []
        by_pool: dict[str, list[Part]] = {}
        for load in loads:
            for part in load.parts:
                by_pool.setdefault(part.pool.name, []).append(part)
                if part.layers is not None:
                    reads.append(self._read_of(part))
        for parts in by_pool.values():
            places = [place for part in parts for place in part.places if place]
            if places:
                indices = torch.cat(
                    [_of(part, np.array([place is not None for place in part.places])) for part in parts]
                )
                slots = self._mover.slots(parts[0].pool, indices, len(places))
                source = self._mover.source(np.stack([place.row for place in places]))
                copies.append(_Copy(parts[0].pool, slots, source, len(places)))
        return copies, reads

    def _read_of(self, part: Part) -> Read:
        assert part.layers is not None
        which = np.array([place is None for place in part.places])
        pages = int(which.sum())
        return Read(part.pool, part.layers, self._mover.slots(part.pool, _of(part, which), pages), pages)

    def _run(self) -> None:
        while task := self._queue.get():
            try:
                self._move(*task)
            except Exception as error:  # noqa: BLE001 - whoever waits must not wait for ever
                self._report(error)
                _close(task[2])
                task[0].fail()

    def _move(self, batch: Batch, copies: list[_Copy], reads: list[Read]) -> None:
        good, begun, since = True, list[_Begun](), 0.0
        drives = self._mover.reads() if reads else None
        for layer in range(self._layers):
            for issued in range(len(begun), batch.await_issue(layer)):
                deadline = time.monotonic() + (issued - layer + 1) * LAYER_SECONDS
                begun.append(_begin(drives, reads, issued, deadline))
            marks = [
                self._mover.put(each.pool, each.slots, tensors, each.source)
                for each in copies
                if (tensors := _tensors(each.pool, layer)) is not None
            ]
            since = max(since, begun[layer].at)
            for end in begun[layer].ends:
                good = good and end()
            if good and self._pacing:
                since = self._pacing.loaded(sum(_bytes(read, layer) for read in reads), since)
            if layer == self._layers - 1:
                good = _close(reads) and good
                batch.failed = not good
            batch.advance(marks)


def _begin(drives: Reads | None, reads: list[Read], layer: int, deadline: float) -> _Begun:
    """Start the reads of a layer, as far as drives can start; the rest is made when they are ended."""
    begun = _Begun(time.monotonic(), [])
    for read in reads:
        assert drives is not None, "this mover brings nothing from drives"
        if (tensors := _tensors(read.pool, layer)) is not None:
            begun.ends.append(partial(drives.end, drives.begin(read, tensors, deadline)))
    return begun


def _close(reads: list[Read]) -> bool:
    """No drive writes for any of them after this, and no memory on the way is used; whether all came whole."""
    whole = [bool(read.layers.close().all()) for read in reads]
    return all(whole)


def _of(part: Part, which: npt.NDArray[np.bool_]) -> torch.Tensor:
    """The token slots of some pages of a part."""
    if which.all():
        return part.indices
    pages = part.indices.reshape(len(which), -1)
    return pages[torch.from_numpy(which).to(pages.device)].reshape(-1)


def _tensors(pool: DevicePool, layer: int) -> slice | None:
    """Those of the layer, if this pool has any."""
    tensors = pool.layers[layer] if layer < len(pool.layers) else slice(0, 0)
    return tensors if tensors.stop > tensors.start else None


def _bytes(read: Read, layer: int) -> int:
    """That are read for the layer."""
    tensors = _tensors(read.pool, layer)
    return 0 if tensors is None else read.pages * sum(read.pool.view.maps[0].sizes[tensors])
