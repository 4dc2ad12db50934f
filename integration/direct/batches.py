"""The loads of one forward pass, and what SGLang's pools ask before they hand out a layer."""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tutti_sglang.integration.direct.movers import Mark
from tutti_sglang.integration.direct.pools import DevicePool
from tutti_sglang.integration.direct.room import Place
from tutti_sglang.schedule.layer_plan import Issue
from tutti_sglang.store import Layers


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


class Pacer(Protocol):
    """What says how much is issued with which layer. On the scheduler thread."""

    @property
    def ready(self) -> bool:
        """Whether it may know the step that will run."""

    def plan(self, loads: Sequence[int]) -> Sequence[Issue] | None:
        """(L,) what is issued with each layer of the step that runs now, of (L,) bytes from drives; None: all at once,
        for of such a step nothing is known."""

    def issue(self, layer: int, issue: Issue) -> None:
        """The layer is about to be computed."""


class Batch:
    """The loads of one forward pass. `ready`: layers that are in their slots, or on a stream on their way there;
    `times`: since when each is (time.monotonic()); `issued`: layers that may be read from the drives by now."""

    def __init__(self, loads: list[Load], layers: int) -> None:
        self.loads = loads
        self.ready = 0
        self.issued = layers
        self.failed = False
        self.waited = 0.0
        self.times: list[float] = []
        self._layers = layers
        self._marks: list[list[Mark]] = [[] for _ in range(layers)]
        self._changed = threading.Condition()
        self._pacer: Pacer | None = None
        self._bytes: Sequence[int] = ()
        self._plan: Sequence[Issue] = ()
        self._asked = 0

    def pace(self, pacer: Pacer, loads: Sequence[int]) -> None:
        """Before anything is read: of (L,) bytes from drives layer 0's are due, the others when `pacer` says."""
        self._pacer, self._bytes, self.issued = pacer, loads, min(1, self._layers)

    def follow(self) -> None:
        """Its forward pass begins, and the scheduler has told which step that is."""
        if self._pacer is None or self._plan:
            return
        plan = self._pacer.plan(self._bytes)
        if plan is None:
            self.release()
        else:
            self._plan = plan

    def release(self) -> None:
        """Everything may be read."""
        self._pacer = None
        self._issue(self._layers)

    def await_issue(self, layer: int) -> int:
        """Wait until this layer may be read; how many may."""
        with self._changed:
            self._changed.wait_for(lambda: self.issued > layer)
            return self.issued

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
            self.failed, self.ready, self.issued = True, self._layers, self._layers
            self._changed.notify_all()

    def wait_until(self, layer: int) -> None:
        """The caller's next work comes after this layer's. On the scheduler thread."""
        if self._pacer:
            self._ask(layer)
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

    def _ask(self, layer: int) -> None:
        """Issue what goes with the layers up to this one."""
        if not self._plan:  # a forward pass that nobody announced
            self.release()
            return
        assert self._pacer
        for each in range(self._asked, layer + 1):
            self._pacer.issue(each, self._plan[each])
            self._issue(self._plan[each].end)
        self._asked = max(self._asked, layer + 1)

    def _issue(self, layers: int) -> None:
        with self._changed:
            self.issued = max(self.issued, layers)
            self._changed.notify_all()


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
        self._release_before(index)
        batch = self._batches.get(index)
        if batch is not None:
            batch.follow()

    def wait_until(self, threshold: int) -> None:
        """Layer `threshold` of the current batch is in its slots for whatever the caller does next."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            batch.wait_until(threshold)

    def take(self, index: int) -> Batch | None:
        """The batch is being finished."""
        self._release_before(index)
        return self._batches.pop(index, None)

    def reset(self) -> list[Batch]:
        """Forget all batches; those that were not finished."""
        batches, self._batches = list(self._batches.values()), {}
        self.consumer_index = -1
        return batches

    def _release_before(self, index: int) -> None:
        """Batches are moved in their order: one whose forward pass was left out must not hold up those behind it."""
        for each, batch in self._batches.items():
            if each < index:
                batch.release()
