"""Processes that read and write drives in simulated time, by the rules of `turns`; what must hold is checked."""

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from tutti_sglang.engine.rows import BEAT, UNTIL
from tutti_sglang.engine.turns import PATIENCE, Read, Turns

MS = 1_000_000
LATE = 2000 * MS
LOADS = 2
MIX = 2.2
"""A drive takes so many times longer for what it does while reads and writes meet on it (they cost 25 to 60 %)."""


class Settings(NamedTuple):
    """`delay`: ns until a process sees what another has written; `busy`: share of a drive's time that is asked for;
    `deaths`: whether processes are killed now and then."""

    processes: int = 2
    drives: int = 2
    delay: int = 20_000
    busy: float = 0.5
    deaths: bool = False


class Words:
    """Rows whose values reach the other processes `delay` ns late. Stands in for `rows.Rows`."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.alive = True
        self._values: dict[int, int] = defaultdict(int)
        self._old: dict[int, tuple[int, int]] = {}
        """word → (when it changed, what it was until then)."""

    def get(self, at: int) -> int:
        return self._values[at]

    def set(self, at: int, value: int) -> None:
        assert value >= 0
        self._old[at] = (self._world.now, self.seen(at))
        self._values[at] = value

    def seen(self, at: int) -> int:
        changed, before = self._old.get(at, (-(1 << 60), 0))
        return self._values[at] if self._world.now - changed >= self._world.settings.delay else before

    def look(self, now: int) -> None:
        pass

    def others(self, at: int) -> list[int]:
        rows = [each.words for each in self._world.everybody if each.words is not self]
        return [value for row in rows if row.alive and (value := row.seen(at))]


class Process:
    """One process: `reads` in flight and `writes` in flight by drive, and what it has accepted and not written."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.words = Words(world)
        self.turns = Turns(self.words)  # type: ignore[arg-type]
        self.reads: dict[int, int] = defaultdict(int)
        self.writes: dict[int, int] = defaultdict(int)
        self.queue: deque[tuple[int, int]] = deque()
        self.loads = 0

    def read_comes(self) -> None:
        world = self.world
        drives = world.some_drives()
        read = self.turns.arrive(drives, world.now)
        self.try_read(read, world.random.randrange(1, 9) << 20)

    def try_read(self, read: Read, nbytes: int) -> None:
        world = self.world
        if not self.words.alive:
            return
        if not self.turns.try_read(read, world.now):
            world.at(world.now + MS // 2, lambda: self.try_read(read, nbytes))
            return
        waited = world.now - read.since
        world.check(waited <= PATIENCE + MS, f"a read waited {waited / MS:.1f} ms")
        world.longest_read = max(world.longest_read, waited)
        world.start(self, read.drives, nbytes, self.reads, self.writes, lambda: self.turns.finish_read(read))

    def write_comes(self) -> None:
        self.queue.append((self.world.now, 8 << 20))
        self.try_write()

    def try_write(self) -> None:
        world = self.world
        if not self.queue or self.loads >= LOADS or not self.words.alive:
            return
        since = self.queue[0][0]
        drives = tuple(range(world.settings.drives))
        verdict = self.turns.try_write(drives, world.now, forced=world.now - since >= LATE)
        if not verdict.starts:
            world.at(world.now + 2 * MS, self.try_write)
            return
        world.verdicts[verdict.value] += 1
        world.longest_write = max(world.longest_write, world.now - since)
        _, nbytes = self.queue.popleft()
        self.loads += 1

        def done() -> None:
            self.loads -= 1
            self.turns.finish_write(drives, world.now)
            self.try_write()

        world.start(self, drives, nbytes, self.writes, self.reads, done)
        self.try_write()

    def step(self) -> None:
        """The scheduler runs a prefill that lets no write start, or a decode step, or falls silent."""
        world = self.world
        kind = world.random.random()
        if kind < 0.8:
            self.words.set(UNTIL, 0 if kind < 0.4 else 1 << 62)
            self.words.set(BEAT, world.now)


class World:
    """The clock, the drives and what happens. `check` collects what went wrong."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings, self.random = settings, random.Random(seed)
        self.now = MS
        self.everybody = [Process(self) for _ in range(settings.processes)]
        self.busy = [0] * settings.drives
        self.mixed = [0] * settings.drives
        self.flying: list[dict[str, int]] = [{"reads": 0, "writes": 0} for _ in range(settings.drives)]
        self.wrong: list[str] = []
        self.events = 0
        self.longest_read = self.longest_write = 0
        self.verdicts: dict[str, int] = defaultdict(int)
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._since = [self.now] * settings.drives

    def check(self, good: bool, text: str) -> None:
        if not good:
            self.wrong.append(text)

    def at(self, when: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._serial), act))

    def some_drives(self) -> tuple[int, ...]:
        every = range(self.settings.drives)
        return tuple(every) if self.random.random() < 0.7 else (self.random.choice(every),)

    def run(self, events: int) -> None:
        """Arrivals for so many events, then until all is done."""
        gap = int(7 * MS / self.settings.busy)
        for process in self.everybody:
            self._repeat(process, process.read_comes, 2 * gap * len(self.everybody), events)
            self._repeat(process, process.write_comes, 2 * gap * len(self.everybody), events)
            self._repeat(process, process.step, 30 * MS, events)
        if self.settings.deaths:
            self.at(300 * MS, lambda: self._kill(events))
        while self._heap:
            self.now, _, act = heapq.heappop(self._heap)
            act()
            self.events += 1

    def start(
        self,
        process: Process,
        drives: tuple[int, ...],
        nbytes: int,
        own: dict[int, int],
        other: dict[int, int],
        done: Callable[[], None],
    ) -> None:
        """I/O starts now and ends when the slowest drive has done its part; then `done` is called."""
        kind = "reads" if own is process.reads else "writes"
        longest = 0
        for drive in drives:
            self.check(not other[drive], f"{kind} start on drive {drive} beside the other kind of the same process")
            self._account(drive)
            own[drive] += 1
            self.flying[drive][kind] += 1
            meets = all(self.flying[drive].values())
            beside = sum(self.flying[drive].values())
            longest = max(longest, int(nbytes / len(drives) * beside * (MIX if meets else 1)))  # 1 GB/s: a byte per ns

        def end() -> None:
            for drive in drives:
                self._account(drive)
                own[drive] -= 1
                self.flying[drive][kind] -= 1
            if process.words.alive:
                done()

        self.at(self.now + longest, end)

    def _repeat(self, process: Process, act: Callable[[], None], gap: int, events: int) -> None:
        def again() -> None:
            if process.words.alive:
                act()
                if self.events < events:
                    self.at(self.now + 1 + int(self.random.expovariate(1 / gap)), again)

        self.at(self.now + self.random.randrange(gap), again)

    def _kill(self, events: int) -> None:
        """A process dies in the middle of whatever it does; another takes its place, with a row of its own."""
        dead = self.random.choice(self.everybody)
        dead.words.alive = False
        born = Process(self)
        self.everybody[self.everybody.index(dead)] = born
        self._repeat(born, born.read_comes, 30 * MS, events)
        self._repeat(born, born.write_comes, 30 * MS, events)
        if self.events < events:
            self.at(self.now + 300 * MS, lambda: self._kill(events))

    def _account(self, drive: int) -> None:
        spent, self._since[drive] = self.now - self._since[drive], self.now
        flying = self.flying[drive]
        self.busy[drive] += spent * any(flying.values())
        self.mixed[drive] += spent * all(flying.values())
