"""What may need the index's drive, made beside the caller: a drive that hangs makes misses, not threads that hang."""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from tutti_sglang.metrics import Metrics
from tutti_sglang.store.errands import Errands
from tutti_sglang.store.filesystem import look_at
from tutti_sglang.store.index import Index, Lookup, nothing
from tutti_sglang.store.owners import Owners, Read
from tutti_sglang.store.report import Reporter
from tutti_sglang.store.slots import Slots

T = TypeVar("T")

SECONDS = 1.0
"""For an answer. What is in the page cache takes a thousandth of it."""


class IndexDrive:
    """What SGLang's threads want of the index and of the files beside it. Thread safe, not fork safe. While an answer
    is owed nothing else is asked, and all is a miss at once."""

    def __init__(self, index: Index, owners: Owners, errands: Errands, metrics: Metrics, reporter: Reporter) -> None:
        self._index, self._owners, self._errands = index, owners, errands
        self._metrics, self._reporter = metrics, reporter

    def ask(self, act: Callable[[], T], otherwise: T, seconds: float = SECONDS) -> T:
        """What `act` returns or raises, made by the one thread that asks; `otherwise` where that takes too long: it may
        still come to pass."""
        try:
            return self._errands.call(act, seconds, turn=seconds)
        except TimeoutError:
            self._metrics.add("tutti_index_errors", op="timeout")
            where = self._index.path.parent
            text = f"The index in {where} does not answer; until it does, all is a miss. {look_at(where)}"
            self._reporter.warn("index silent", text)
            return otherwise

    def locate(self, namespace: int, keys: bytes, *, lately: bool = False) -> Slots:
        """As `Index.locate`: directly, where it needs no more than what is in the page cache for sure."""
        act = partial(self._index.locate, namespace, keys, lately=lately)
        if self._index.table and not self._index.held_up and not self._errands.stuck:
            return act()
        return self.ask(act, nothing(keys).records["slot"].astype("i8"))

    def lookup(self, namespace: int, keys: bytes) -> Lookup:
        """As `Index.lookup`."""
        return self.ask(partial(self._index.lookup, namespace, keys), nothing(keys))

    @contextlib.contextmanager
    def reading(self, grace: float) -> Iterator[Read]:
        """As `Owners.reading`; where it cannot be said that there is a read, it has expired from the start."""
        read = Read(self._index.last_epoch)
        try:
            if not self.ask(partial(self._begin, read, grace), False):
                read.start = time.monotonic() - grace - 1
            yield read
        finally:
            self._errands.later(partial(self._owners.end, read, grace))

    def close(self) -> None:
        """Nothing can be asked any more."""
        self._errands.close(lambda: None)

    def _begin(self, read: Read, grace: float) -> bool:
        self._owners.begin(read, grace)
        return True
