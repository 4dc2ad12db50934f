"""Whose turn it is on a drive: the rules between reads and writes, on words and a clock that the caller tells.

- A read says that it is there and starts at once, unless writes are in flight on one of its drives: it lets these end,
  for PATIENCE at most. No further write starts before it.
- A write starts when its process's scheduler lets it (`UNTIL`) and no read is in flight, waiting or due on its drives.
- A write that is late, or that somebody waits for, takes a turn: reads in flight end, reads that come wait, one load is
  written, the reads that wait go. So neither starves the other.
- What others wrote is old when it is read. Both announce themselves before they look, so that one of them sees it.
"""

import enum
from collections.abc import Sequence

from tutti_sglang.engine.rows import BEAT, DUE, RUNNING, TURN, UNTIL, WAITING, WRITES, Rows, word

PATIENCE = 100_000_000
"""Nanoseconds that one class waits for I/O of the other that should end by itself: a drive that hangs holds nobody."""

COURTESY = 5_000_000
"""Nanoseconds in which reads of other processes that have waited for a load may start before the next."""

DEAF = 100_000_000
"""A scheduler that was not heard for so many nanoseconds is idle."""


class Verdict(enum.Enum):
    """Why a write may start, or what it waits for."""

    GO = "go"
    TURN = "turn"
    READS = "reads"
    COMPUTE = "compute"

    @property
    def starts(self) -> bool:
        """Whether the write may start."""
        return self in (Verdict.GO, Verdict.TURN)


class Read:
    """One call that reads from `drives`."""

    __slots__ = ("drives", "patience", "running", "since")

    def __init__(self, drives: Sequence[int], since: int, patience: int) -> None:
        self.drives, self.since, self.patience, self.running = drives, since, patience, False


class Turns:
    """The part of one process; not thread safe. Times in nanoseconds of one monotonic clock of the machine."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._reads: set[Read] = set()
        self._turn_since: dict[int, int] = {}
        self._courtesy: dict[int, int] = {}

    def arrive(self, drives: Sequence[int], now: int, patience: int = PATIENCE) -> Read:
        """A read is there. Ask `try_read` until it may go; hand it to `finish_read` in any case."""
        self._rows.look(now)
        read = Read(drives, now, patience)
        self._reads.add(read)
        self._count(drives, WAITING, 1)
        return read

    def try_read(self, read: Read, now: int) -> bool:
        """Whether the read may go, or goes already."""
        if not read.running and (now - read.since >= read.patience or not self._written(read.drives, now)):
            self._start(read)
        return read.running

    def finish_read(self, read: Read) -> None:
        """It is done, or was given up."""
        self._reads.discard(read)
        self._count(read.drives, RUNNING if read.running else WAITING, -1)

    def expect_reads(self, drives: Sequence[int], until: int) -> None:
        """Reads are likely to come before `until`: a write that starts now would be in their way."""
        for drive in drives:
            self._rows.set(word(drive, DUE), until)

    def listening(self, now: int) -> bool:
        """Whether a scheduler of this process was heard of lately."""
        beat = self._rows.get(BEAT)
        return beat > 0 and now - beat <= DEAF

    def lets_write(self, now: int) -> bool:
        """Whether this process's scheduler lets writes start."""
        return not self.listening(now) or now < self._rows.get(UNTIL)

    def try_write(self, drives: Sequence[int], now: int, *, forced: bool) -> Verdict:
        """Start a write, if it may: end it with `finish_write`. `forced`: it is late, or somebody waits for it."""
        self._rows.look(now)
        verdict = self._forced(drives, now) if forced else self._asked(drives, now)
        if verdict.starts:
            self.start_write(drives)
            if verdict is Verdict.GO and self._any_read(drives, now):  # it came at the same moment
                self._count(drives, WRITES, -1)
                return Verdict.READS
        return verdict

    def start_write(self, drives: Sequence[int]) -> None:
        """One more write is in flight: a part of one that `try_write` let start."""
        self._count(drives, WRITES, 1)

    def finish_write(self, drives: Sequence[int], now: int) -> None:
        """A write has ended: reads that waited for it go before the next one."""
        self._count(drives, WRITES, -1)
        for drive in drives:
            if not self._rows.get(word(drive, WRITES)):
                self._end_turn(drive)
                if self._rows.others(word(drive, WAITING)):
                    self._courtesy[drive] = now + COURTESY
        for read in self._reads:
            if not read.running and not self._written(read.drives, now):
                self._start(read)

    def mixed(self, drive: int) -> bool:
        """Whether reads and writes are in flight there, of whatever process."""
        return self._sum(drive, RUNNING) > 0 and self._sum(drive, WRITES) > 0

    def _asked(self, drives: Sequence[int], now: int) -> Verdict:
        for drive in drives:
            self._end_turn(drive)
        if self._any_read(drives, now):
            return Verdict.READS
        return Verdict.GO if self.lets_write(now) else Verdict.COMPUTE

    def _forced(self, drives: Sequence[int], now: int) -> Verdict:
        for drive in drives:
            waiting = self._sum(drive, WAITING) > 0
            mine = self._rows.get(word(drive, WRITES)) > 0
            if waiting and (mine or now < self._courtesy.get(drive, 0)):
                return Verdict.READS
        for drive in drives:
            self._turn_since.setdefault(drive, now)
            self._rows.set(word(drive, TURN), now + PATIENCE)  # ends by itself, should the write be withdrawn
        busy = [drive for drive in drives if self._sum(drive, RUNNING)]
        patient = any(now - self._turn_since[drive] < PATIENCE for drive in busy)
        return Verdict.READS if patient else Verdict.TURN

    def _end_turn(self, drive: int) -> None:
        self._turn_since.pop(drive, None)
        self._rows.set(word(drive, TURN), 0)

    def _start(self, read: Read) -> None:
        read.running = True
        self._count(read.drives, RUNNING, 1)  # first: it must not be unseen in between
        self._count(read.drives, WAITING, -1)

    def _count(self, drives: Sequence[int], which: int, change: int) -> None:
        for drive in drives:
            at = word(drive, which)
            self._rows.set(at, max(0, self._rows.get(at) + change))  # 0 already once the rows are closed

    def _sum(self, drive: int, which: int) -> int:
        at = word(drive, which)
        return self._rows.get(at) + sum(self._rows.others(at))

    def _until(self, drive: int, which: int, now: int) -> bool:
        at = word(drive, which)
        return any(until > now for until in (self._rows.get(at), *self._rows.others(at)))

    def _written(self, drives: Sequence[int], now: int) -> bool:
        return any(self._sum(drive, WRITES) or self._until(drive, TURN, now) for drive in drives)

    def _any_read(self, drives: Sequence[int], now: int) -> bool:
        return any(
            self._sum(drive, RUNNING) or self._sum(drive, WAITING) or self._until(drive, DUE, now) for drive in drives
        )
