"""When this process's I/O may start: what a reader or writer asks before a batch, and what it tells when that ends.

The rules are in `turns`, the words that processes share in `rows`; here they meet threads and the clock. What the
scheduler does is told by `schedule.gate`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tutti_sglang.engine.batch import IoClass
from tutti_sglang.engine.rows import RUNNING, WRITES, Rows, word
from tutti_sglang.engine.turns import PATIENCE, Read, Turns, Verdict
from tutti_sglang.metrics import Metrics

LATE = 2.0
"""Seconds after which a write no longer waits for its window."""

LOAD_SECONDS = 0.02
"""How long a load may take where reads may come: what a read waits for at most, behind a write that has started."""

LEAST_BYTES = 4 << 20
QUIET = 1.0
"""Seconds without a read after which loads need not be short."""

_POLL = 0.0005  # nobody wakes us when another process's I/O ends
_PAUSE = 0.002


class Window:
    """Of one store in one process. Thread safe. `enabled` False: everything starts at once."""

    def __init__(
        self,
        rows: Rows,
        metrics: Metrics,
        drives: Sequence[int] = (),
        *,
        enabled: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`drives`: those of the store."""
        self.enabled = enabled
        self.drives = tuple(drives)
        self._in_flight = tuple(word(drive, which) for drive in drives for which in (RUNNING, WRITES))
        self._rows, self._metrics, self._clock = rows, metrics, clock
        self._turns = Turns(rows)
        self._changed = threading.Condition()
        self._mixed_since: dict[int, int] = {}
        self._held: tuple[Verdict, int] | None = None
        self._latest_read = -(10**12)
        self._rate = 0.0

    @property
    def why_alone(self) -> str:
        """Why other processes of the store are not seen; empty when they are."""
        return self._rows.why_alone

    @property
    def write_rate(self) -> float:
        """Bytes per second of this process's latest loads of writes; 0 before the first."""
        return self._rate

    def busy(self, now: int = 0) -> bool:
        """Whether I/O is in flight on a drive of the store, of whatever process. `now`: of the window's clock, where
        the caller has just looked at it."""
        self._rows.look(now or self._clock())
        return self._rows.any(self._in_flight)

    def hear(self, mode: int, until: int, heard: int = 0) -> None:
        """The scheduler runs `mode` and lets writes start until `until` (ns). `heard`: when it counts as heard of, now
        by default. Cheap: it is called in each step."""
        self._rows.hear(mode, until, heard or self._clock())

    @contextlib.contextmanager
    def reading(self, drives: Sequence[int], klass: IoClass = IoClass.DEMAND) -> Iterator[None]:
        """Around a call that reads: no write is in flight on `drives` when it starts, unless that lasts too long."""
        if not self.enabled:
            yield
            return
        read = self._enter(drives, 10 * PATIENCE if klass is IoClass.PRELOAD else PATIENCE)
        try:
            yield
        finally:
            with self._changed:
                self._latest_read = self._clock()
                self._turns.finish_read(read)
                self._note(drives)
                self._changed.notify_all()

    def expect_reads(self, drives: Sequence[int], seconds: float) -> None:
        """Reads of `drives` are likely within `seconds`."""
        if self.enabled:
            with self._changed:
                self._latest_read = self._clock()
                self._turns.expect_reads(drives, self._latest_read + int(seconds * 1e9))

    @contextlib.contextmanager
    def turn(self, drives: Sequence[int], since: float, *, hurry: bool = False) -> Iterator[bool]:
        """Whether writes may start in this block; those that do stay in flight with `writing`. `since`: when the oldest
        of them came (time.monotonic() seconds); `hurry`: somebody waits for them."""
        if not self.enabled:
            yield True
            return
        with self._changed:
            now = self._clock()
            late = now / 1e9 - since >= LATE
            verdict = self._turns.try_write(drives, now, forced=hurry or late)
            self._book(verdict, now, "waited for" if hurry else "late")
            self._note(drives)
        try:
            yield verdict.starts
        finally:
            if verdict.starts:
                self._finish(drives)

    @contextlib.contextmanager
    def writing(self, drives: Sequence[int], nbytes: int) -> Iterator[None]:
        """From the start of a load, inside `turn`, until its last write has ended."""
        if not self.enabled:
            yield
            return
        with self._changed:
            self._turns.start_write(drives)
            start = self._clock()
        try:
            yield
        finally:
            self._finish(drives)
            rate = nbytes / max(1e-6, (self._clock() - start) / 1e9)
            self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate

    def calm(self, since: float) -> bool:
        """Whether work that touches no drive may start now, as far as the scheduler says. `since`: when it came
        (time.monotonic() seconds); it does not wait longer than a write would."""
        now = self._clock()
        return not self.enabled or now / 1e9 - since >= LATE or self._turns.lets_write(now)

    def pause(self) -> None:
        """Wait a moment, or until I/O of this process has ended."""
        with self._changed:
            self._changed.wait(_PAUSE)

    @property
    def quiet(self) -> bool:
        """No scheduler works and no read has come lately: loads need not be short, nor one at a time."""
        now = self._clock()
        return not self.enabled or (not self._turns.listening(now) and now - self._latest_read > QUIET * 1e9)

    def most_bytes(self, limit: int) -> int:
        """How much one load should write, of `limit` at most: little while a scheduler works or reads come."""
        return limit if self.quiet else min(limit, max(LEAST_BYTES, int(self._rate * LOAD_SECONDS)))

    def close(self) -> None:
        """Leave the store's gate."""
        self._rows.close()

    def _enter(self, drives: Sequence[int], patience: int) -> Read:
        with self._changed:
            start = self._latest_read = self._clock()
            read = self._turns.arrive(drives, start, patience)
            while not self._turns.try_read(read, self._clock()):
                self._changed.wait(_POLL)
            self._note(drives)
            waited = self._clock() - start
        self._metrics.add("tutti_read_wait_seconds", waited / 1e9)
        self._metrics.observe("tutti_wait_seconds", waited / 1e9, phase="turn")
        return read

    def _finish(self, drives: Sequence[int]) -> None:
        with self._changed:
            self._turns.finish_write(drives, self._clock())
            self._note(drives)
            self._changed.notify_all()

    def _book(self, verdict: Verdict, now: int, why: str) -> None:
        """Count a write that starts, and how long what was held."""
        if self._held:
            self._metrics.add("tutti_write_wait_seconds", (now - self._held[1]) / 1e9, reason=self._held[0].value)
        if verdict.starts:
            self._metrics.add("tutti_write_turns", reason=why if verdict is Verdict.TURN else "window")
        self._held = None if verdict.starts else (verdict, now)

    def _note(self, drives: Sequence[int]) -> None:
        """Measure for how long reads and writes meet on a drive, seen from here."""
        now = self._clock()
        for drive in drives:
            since = self._mixed_since.pop(drive, None)
            if since is not None:
                self._metrics.add("tutti_overlap_seconds", (now - since) / 1e9, drive=str(drive))
            if self._turns.mixed(drive):
                self._mixed_since[drive] = now
