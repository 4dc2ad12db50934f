"""Reads and writes take turns: over 10⁵ events of simulated time, no mixing in a process, hardly any between processes,
nobody starves, the dead hold nothing."""

import pytest

from tests.engine.gate_world import LATE, MS, Settings, World
from tutti_sglang.engine.rows import BEAT, RUNNING, TURN, UNTIL, WAITING, WRITES, word
from tutti_sglang.engine.turns import DEAF, PATIENCE, Turns, Verdict

EVENTS = 100_000


@pytest.mark.parametrize(
    ("settings", "seed"),
    [
        (Settings(processes=1, drives=1), 1),
        (Settings(processes=1, drives=3, busy=0.7), 2),
        (Settings(processes=2, drives=2), 3),
        (Settings(processes=4, drives=1, busy=0.6), 4),
        (Settings(processes=3, drives=2, delay=100_000), 5),
        (Settings(processes=3, drives=2, deaths=True), 6),
    ],
    ids=str,
)
def test_whatever_comes_reads_and_writes_take_turns(settings: Settings, seed: int) -> None:
    world = World(settings, seed)
    world.run(EVENTS)
    assert world.events >= EVENTS
    assert not world.wrong, world.wrong[:5]
    for busy, mixed in zip(world.busy, world.mixed, strict=True):
        assert mixed < 0.01 * busy, f"{mixed / busy:.2%} of a drive's time mixed"
    assert world.longest_read <= PATIENCE + MS
    assert world.longest_write <= 2 * LATE  # it is late after LATE, then it is its turn
    assert not any(process.queue or process.loads for process in world.everybody)


def test_without_the_rules_the_world_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "try_read", lambda turns, read, now: turns._start(read) or True)
    world = World(Settings(processes=1, drives=1), 1)
    world.run(2000)
    assert world.wrong
    assert world.mixed[0] > 0.01 * world.busy[0]


class TestOneProcess:
    """Its rules one by one, on one drive."""

    def setup_method(self) -> None:
        self.world = World(Settings(processes=2, drives=1), 0)
        self.turns, self.other = (process.turns for process in self.world.everybody)
        self.words = self.world.everybody[0].words
        self.now = self.world.now

    def write(self, later: int = 0, *, forced: bool = False) -> Verdict:
        self.world.now = self.now + later
        return self.turns.try_write((0,), self.now + later, forced=forced)

    def test_a_write_without_a_scheduler_or_reads_starts(self) -> None:
        assert self.write() is Verdict.GO

    def test_a_write_waits_while_compute_is_not_to_be_disturbed_but_not_for_a_scheduler_that_fell_silent(self) -> None:
        self.words.set(BEAT, self.now)
        assert self.write() is Verdict.COMPUTE
        assert self.write(DEAF) is Verdict.COMPUTE
        assert self.write(DEAF + 1) is Verdict.GO

    def test_slack_lets_a_write_start_until_it_is_used_up(self) -> None:
        self.words.set(BEAT, self.now)
        self.words.set(UNTIL, self.now + 5 * MS)
        assert self.write(6 * MS) is Verdict.COMPUTE
        assert self.write(4 * MS) is Verdict.GO

    @pytest.mark.parametrize("whose", ["own", "other"])
    def test_a_write_waits_for_reads(self, whose: str) -> None:
        reader = self.turns if whose == "own" else self.other
        read = reader.arrive((0,), self.now)
        assert reader.try_read(read, self.now)
        assert self.write(MS) is Verdict.READS
        reader.finish_read(read)
        assert self.write(2 * MS) is Verdict.GO

    def test_a_write_waits_for_reads_that_are_due_but_not_for_ever(self) -> None:
        self.turns.expect_reads((0,), self.now + 10 * MS)
        assert self.write(9 * MS) is Verdict.READS
        assert self.write(10 * MS) is Verdict.GO

    def test_a_read_waits_for_a_load_and_goes_when_it_ends(self) -> None:
        assert self.write() is Verdict.GO
        read = self.turns.arrive((0,), self.now)
        assert not self.turns.try_read(read, self.now + MS)
        self.turns.finish_write((0,), self.now + 2 * MS)
        assert read.running

    def test_a_read_does_not_wait_for_a_drive_that_hangs(self) -> None:
        assert self.write() is Verdict.GO
        read = self.turns.arrive((0,), self.now)
        assert not self.turns.try_read(read, self.now + PATIENCE - 1)
        assert self.turns.try_read(read, self.now + PATIENCE)

    def test_a_late_write_takes_the_turn_after_the_reads_in_flight_and_gives_it_back(self) -> None:
        running = self.turns.arrive((0,), self.now)
        assert self.turns.try_read(running, self.now)
        assert self.write(forced=True) is Verdict.READS
        waiting = self.turns.arrive((0,), self.now)
        assert not self.turns.try_read(waiting, self.now)
        self.turns.finish_read(running)
        assert self.write(MS, forced=True) is Verdict.TURN
        assert self.write(MS, forced=True) is Verdict.READS  # the one that waits comes first
        self.turns.finish_write((0,), self.now + 2 * MS)
        assert waiting.running

    def test_a_late_write_does_not_wait_for_a_read_that_hangs(self) -> None:
        read = self.turns.arrive((0,), self.now)
        assert self.turns.try_read(read, self.now)
        assert self.write(forced=True) is Verdict.READS
        assert self.write(PATIENCE, forced=True) is Verdict.TURN

    def test_a_turn_that_nobody_uses_ends(self) -> None:
        read = self.turns.arrive((0,), self.now)
        assert self.turns.try_read(read, self.now)
        assert self.write(forced=True) is Verdict.READS
        self.turns.finish_read(read)
        late = self.turns.arrive((0,), self.now + PATIENCE // 2)
        assert not self.turns.try_read(late, self.now + PATIENCE // 2)
        assert self.turns.try_read(late, self.now + PATIENCE)

    def test_all_words_are_back_at_zero_when_all_is_done(self) -> None:
        read = self.turns.arrive((0,), self.now)
        assert self.turns.try_read(read, self.now)
        self.turns.finish_read(read)
        self.turns.finish_read(self.turns.arrive((0,), self.now))  # given up before it ran
        assert self.write() is Verdict.GO
        self.turns.finish_write((0,), self.now)
        assert not any(self.words.get(word(0, which)) for which in (RUNNING, WAITING, WRITES, TURN))
