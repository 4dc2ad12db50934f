"""Layer by layer into device slots, in step with the forward pass: what was staged is copied, the rest is read.

A batch holds the loads of all requests that are admitted together; layer l of all their pages is moved as one. The
forward waits for each layer in `LayerCounter.wait_until`, and no longer.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tutti_sglang.integration.direct.movers import Mark, Mover, Slots, Source
from tutti_sglang.integration.direct.pools import DevicePool
from tutti_sglang.integration.direct.room import Place
from tutti_sglang.memory import Addresses
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import Layers, Started

LAYER_SECONDS = 60.0
"""A layer that takes longer has failed; until then nobody gives up what a drive may still deliver."""


@dataclass(eq=False)
class Part:
    """The pages of one pool that a request loads. `places`: where each is staged, None for those that are read;
    `layers`: the open reads of these, in order."""

    pool: DevicePool
    indices: torch.Tensor
    places: list[Place | None]
    layers: Layers | None = None


@dataclass(eq=False)
class Load:
    """All that a request loads. `held`: what must stay open until its pages are in their slots."""

    rid: str
    parts: list[Part]
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


@dataclass(frozen=True)
class _Copy:
    """Pages of a pool whose tensors lie in host memory."""

    pool: DevicePool
    slots: Slots
    source: Source
    pages: int


@dataclass(frozen=True)
class _Read:
    """Pages of a pool whose tensors come from the drives; `rows`: (n, T) addresses of their slots."""

    pool: DevicePool
    layers: Layers
    rows: Addresses


class Batch:
    """The loads of one forward pass. `ready`: layers that are in their slots, or on a stream on their way there;
    `times`: since when each is (time.monotonic())."""

    def __init__(self, loads: list[Load], layers: int) -> None:
        self.loads = loads
        self.ready = 0
        self.failed = False
        self.waited = 0.0
        self.times: list[float] = []
        self._layers = layers
        self._marks: list[list[Mark]] = [[] for _ in range(layers)]
        self._changed = threading.Condition()

    def advance(self, marks: list[Mark]) -> None:
        """One more layer is under way."""
        with self._changed:
            self._marks[self.ready] = marks
            self.times.append(time.monotonic())
            self.ready += 1
            self._changed.notify_all()

    def fail(self) -> None:
        """Nothing more will come; whoever waits goes on, and `finish` tells."""
        with self._changed:
            self.failed, self.ready = True, self._layers
            self._changed.notify_all()

    def wait_until(self, layer: int) -> None:
        """The caller's next work comes after this layer's."""
        if self.ready <= layer:
            start = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self.ready > layer)
            self.waited += time.monotonic() - start
        for mark in self._marks[layer]:
            mark.wait()

    def is_over(self) -> bool:
        """Whether host memory of the batch is not read any more."""
        return self.ready == self._layers and all(mark.done() for marks in self._marks for mark in marks)


class LayerCounter:
    """What SGLang's pools ask before they hand out a layer (memory_pool.py:2852). Unknown and finished batches never
    wait: decode batches carry the index of the last prefill."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._next = 0
        self._batches: dict[int, Batch] = {}

    def add(self, batch: Batch) -> int:
        """The index under which the forward pass will ask for it."""
        index, self._next = self._next, self._next + 1
        self._batches[index] = batch
        return index

    def batch(self, index: int) -> Batch | None:
        """The batch under this index, until it is finished."""
        return self._batches.get(index)

    def set_consumer(self, index: int) -> None:
        """The next forward pass is that of this batch."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Layer `threshold` of the current batch is in its slots for whatever the caller does next."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            batch.wait_until(threshold)

    def take(self, index: int) -> Batch | None:
        """The batch is being finished."""
        return self._batches.pop(index, None)

    def reset(self) -> list[Batch]:
        """Forget all batches; those that were not finished."""
        batches, self._batches = list(self._batches.values()), {}
        self.consumer_index = -1
        return batches


class Loader:
    """Moves batches: on the caller's thread where that only enqueues, else on a thread of its own, one after the
    other. `free`: gives pages back to the room."""

    def __init__(
        self,
        mover: Mover,
        layers: int,
        free: Callable[[list[Place]], None],
        metrics: Metrics,
        report: Callable[[Exception], None],
    ) -> None:
        self._mover, self._layers, self._free, self._metrics, self._report = mover, layers, free, metrics, report
        self._queue: queue.SimpleQueue[tuple[Batch, list[_Copy], list[_Read]] | None] = queue.SimpleQueue()
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
        self._metrics.add("tutti_load_pages", sum(len(each.rows) for each in reads), source="drive")
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

    def _plan(self, loads: list[Load]) -> tuple[list[_Copy], list[_Read]]:
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

    def _read_of(self, part: Part) -> _Read:
        assert part.layers is not None
        which = np.array([place is None for place in part.places])
        slots = self._mover.slots(part.pool, _of(part, which), int(which.sum()))
        return _Read(part.pool, part.layers, self._mover.rows(part.pool, slots))

    def _run(self) -> None:
        while task := self._queue.get():
            try:
                self._move(*task)
            except Exception as error:  # noqa: BLE001 - whoever waits must not wait for ever
                self._report(error)
                task[0].fail()

    def _begin(self, reads: list[_Read]) -> list[list[tuple[_Read, Started | None]]]:
        """Start all reads of all layers, in their order, where drives reach the slots. (layers,) what is to end."""
        start = time.monotonic()
        return [
            [
                (read, read.layers.begin(tensors, read.rows[:, tensors], start + (layer + 1) * LAYER_SECONDS))
                for read in reads
                if (tensors := _tensors(read.pool, layer)) is not None
            ]
            for layer in range(self._layers)
        ]

    def _move(self, batch: Batch, copies: list[_Copy], reads: list[_Read]) -> None:
        good, begun = True, self._begin(reads)
        for layer in range(self._layers):
            marks = [
                self._mover.put(each.pool, each.slots, tensors, each.source)
                for each in copies
                if (tensors := _tensors(each.pool, layer)) is not None
            ]
            for read, ahead in begun[layer]:
                good = good and bool(read.layers.end(ahead).all())
            if layer == self._layers - 1:
                good = all(bool(read.layers.close().all()) for read in reads) and good
                batch.failed = not good
            batch.advance(marks)


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
