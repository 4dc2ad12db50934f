"""Reads ahead for requests that wait: their stored pages lie verified in host memory before they are admitted.

One thread reads, in the order of the queue, a piece at a time: an abort or a new order takes effect at the next piece.
What a request needs is settled when it arrives. Memory is bounded; a request nearer to the head takes it from those
behind it, which are read again later.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tutti_sglang.engine.batch import IoClass
from tutti_sglang.integration.calls import key_bytes
from tutti_sglang.integration.direct.room import Place, Room
from tutti_sglang.integration.stored import Found, StoredPool
from tutti_sglang.metrics import Metrics

PIECE_BYTES = 32 << 20
READ_SECONDS = 8.0
HOLD_SECONDS = 30.0
"""How long a request is kept from being admitted for what is being read for it."""

Wanted = dict[str, list[str]]
"""Pool → keys of its pages."""

Plan = Callable[[], Wanted]
"""Finds out what is wanted, where that takes too long for the scheduler thread."""


@dataclass(eq=False)
class Waiting:
    """What a request that waits is to find. `tail`: all pages that the device lacked when it arrived; `todo`: not read
    yet, in order; `plan`: what is wanted is not known yet; `complete`: nothing more will be read; `truncated`: because
    there is no more memory for it; `since`: when it could first have been admitted; `version` changes with `staged`."""

    rid: str
    tail: frozenset[str]
    wanted: Wanted
    todo: list[tuple[str, list[str]]]
    plan: Plan | None = None
    staged: dict[str, dict[str, Place]] = field(default_factory=dict)
    complete: bool = False
    truncated: bool = False
    gone: bool = False
    version: int = 0
    since: float | None = None

    def places(self) -> list[Place]:
        """All that is staged."""
        return [place for pool in self.staged.values() for place in pool.values()]

    def is_ready(self) -> bool:
        """Whether it may be admitted, as far as this rank knows."""
        if self.since is None:
            self.since = time.monotonic()
        return self.complete or time.monotonic() - self.since > HOLD_SECONDS


class Preloader:
    """Thread safe. `pools`: name → where its pages are stored, asked anew for each piece, since new weights change it;
    `report`: what to do with an exception; `moved`: is told what a read brought, in bytes and seconds, 0 bytes where
    not all came."""

    def __init__(
        self,
        room: Room,
        pools: Callable[[str], StoredPool],
        metrics: Metrics,
        report: Callable[[Exception], None],
        moved: Callable[[int, float], None] = lambda nbytes, seconds: None,
    ) -> None:
        self._room, self._pools, self._metrics, self._report, self._moved = room, pools, metrics, report, moved
        self._changed = threading.Condition()
        self._waiting: dict[str, Waiting] = {}
        self._order: list[str] = []
        self._busy: Waiting | None = None
        self._starving: tuple[str, int] | None = None  # who lacks memory, and how much was in use then
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tutti-preload", daemon=True)
        self._thread.start()

    def want(self, rid: str, tail: list[str], wanted: Wanted | Plan) -> None:
        """Read `wanted`, what is stored of `tail`; side pools come first: without them the others are of no use."""
        if isinstance(wanted, dict):
            todo = self._pieces(wanted)
            waiting = Waiting(rid, frozenset(tail), wanted, todo, complete=not todo)
        else:
            waiting = Waiting(rid, frozenset(tail), {}, [], wanted)
        with self._changed:
            self._forget(self._waiting.pop(rid, None))
            self._waiting[rid] = waiting
            self._order.append(rid)
            self._changed.notify_all()

    def _pieces(self, wanted: Wanted) -> list[tuple[str, list[str]]]:
        cut = []
        for name, keys in reversed(wanted.items()):
            step = max(1, min(PIECE_BYTES, self._room.size // 4) // self._pools(name).view.page_bytes)
            cut += [(name, keys[at : at + step]) for at in range(0, len(keys), step)]
        return cut

    def find(self, rid: str) -> Waiting | None:
        """What is known of the request."""
        return self._waiting.get(rid)

    def order(self, rids: list[str]) -> None:
        """The queue as it is now: requests that are not in it any more are forgotten. On the scheduler thread, when
        nothing that was looked up has still to be claimed."""
        if rids == self._order:
            return
        with self._changed:
            known = set(rids)
            for rid in [each for each in self._waiting if each not in known]:
                self._forget(self._waiting.pop(rid))
            self._order = [rid for rid in rids if rid in self._waiting]
            self._changed.notify_all()

    def make_room(self) -> None:
        """Let the first request that lacks memory take it from those behind it. When `order` may be called."""
        with self._changed:
            queue = [self._waiting[rid] for rid in self._order if rid in self._waiting]
            needy = next((at for at, each in enumerate(queue) if each.todo and not each.complete), len(queue))
            victim = next((each for each in reversed(queue[needy + 1 :]) if each.staged), None)
            if self._starving and victim and victim is not self._busy:
                self._metrics.add("tutti_preload_objects", len(victim.places()), outcome="dropped")
                victim.todo = self._pieces(victim.wanted)
                victim.complete = victim.truncated = False
                self._release(victim)

    def claim(self, rid: str) -> Waiting | None:
        """Take what is staged; the caller gives the places back to the room."""
        with self._changed:
            found = self._waiting.pop(rid, None)
            if found:
                found.gone = True
            return found

    def give_back(self, waiting: Waiting) -> None:
        """What is left of a claim."""
        with self._changed:
            self._release(waiting)

    def forget(self, rid: str) -> None:
        """The request needs nothing any more."""
        with self._changed:
            self._forget(self._waiting.pop(rid, None))

    def clear(self) -> None:
        """Forget all; nothing is being read when this returns."""
        with self._changed:
            for waiting in self._waiting.values():
                self._forget(waiting)
            self._waiting.clear()
            self._order.clear()
            self._changed.wait_for(lambda: self._busy is None)

    def close(self) -> None:
        """End the thread."""
        self.clear()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def wait(self, seconds: float) -> None:
        """Until something changed, or so long."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """There is more room than before."""
        with self._changed:
            self._changed.notify_all()

    def _forget(self, waiting: Waiting | None) -> None:
        if waiting:
            waiting.gone = True
            self._release(waiting)

    def _release(self, waiting: Waiting) -> None:
        places, waiting.staged = waiting.places(), {}
        waiting.version += 1
        if places:
            self._room.give(places)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
                waiting = self._busy = self._next()
            assert waiting
            try:
                if waiting.plan:
                    self._find_out(waiting, waiting.plan)
                else:
                    self._read(waiting)
            except Exception as error:  # noqa: BLE001 - the thread must live
                self._report(error)
                waiting.complete = True
            with self._changed:
                self._busy = None
                self._changed.notify_all()

    def _next(self) -> Waiting | None:
        """The first request in the queue for which something can be read."""
        for rid in self._order:
            waiting = self._waiting.get(rid)
            if waiting and not waiting.complete:
                return None if self._is_stuck(waiting) else waiting
        return None

    def _is_stuck(self, waiting: Waiting) -> bool:
        return self._starving == (waiting.rid, self._room.used)

    def _find_out(self, waiting: Waiting, plan: Plan) -> None:
        wanted = plan()
        todo = self._pieces(wanted)
        with self._changed:
            waiting.wanted, waiting.todo, waiting.plan = wanted, todo, None
            waiting.complete = not todo

    def _read(self, waiting: Waiting) -> None:
        name, keys = waiting.todo[0]
        pool = self._pools(name)
        span = self._room.take(len(keys), pool.view.maps[0].sizes)
        if span is None:
            self._lack(waiting)
            return
        self._starving = None
        start = time.monotonic()
        found = pool.read(key_bytes(keys), span.rows, start + READ_SECONDS, IoClass.PRELOAD)
        self._moved(len(keys) * pool.view.page_bytes if found.all() else 0, time.monotonic() - start)
        places = [Place(span, index) for index in range(len(keys))]
        with self._changed:
            if waiting.gone or not waiting.todo or waiting.todo[0][1] is not keys:
                self._room.give(places)
                return
            waiting.todo.pop(0)
            kept = self._keep(waiting, name, keys, places, found)
            self._room.give([place for index, place in enumerate(places) if index not in kept])
            waiting.complete = waiting.complete or not waiting.todo

    def _keep(self, waiting: Waiting, name: str, keys: list[str], places: list[Place], found: Found) -> set[int]:
        """Record what came. Behind a page that is missing nothing of its pool will be asked for."""
        kept = {index for index, there in enumerate(found.tolist()) if there}
        waiting.staged.setdefault(name, {}).update({keys[index]: places[index] for index in kept})
        waiting.version += 1
        self._metrics.add("tutti_preload_objects", len(kept), outcome="staged")
        self._metrics.add("tutti_preload_objects", len(keys) - len(kept), outcome="missed")
        if len(kept) < len(keys):
            waiting.todo = [each for each in waiting.todo if each[0] != name]
        return kept

    def _lack(self, waiting: Waiting) -> None:
        """No room. What would never fit stays as far as it came; all others wait until somebody gives some back."""
        with self._changed:
            mine = sum({place.span: place.span.size for place in waiting.places()}.values())
            if mine >= self._room.used:  # all that is in use is its own: there will not be more
                waiting.complete = waiting.truncated = True
                return
            self._starving = (waiting.rid, self._room.used)
