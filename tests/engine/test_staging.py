"""Staging hands out memory that nobody else has, takes all of it back, and never waits longer than it may."""

import gc
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tutti_sglang.engine import Ticket
from tutti_sglang.engine.batch import IN_PROGRESS, IOCTX_DTYPE
from tutti_sglang.engine.staging import Extent, FreeRanges, Staging
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import pinning
from tutti_sglang.memory import PAGE, view
from tutti_sglang.metrics import Metrics

PAGES = 64


def make_staging(pages: int = PAGES) -> tuple[Staging, Metrics]:
    metrics = Metrics(CollectorRegistry())
    return Staging(pages * PAGE, metrics), metrics


class SlowDrive:
    """An engine, as far as the quarantine sees one: an answer comes when `answered` says so."""

    def __init__(self) -> None:
        self.answered = False

    def wait(self, ticket: Ticket, timeout: float) -> np.ndarray:
        assert timeout == 0
        return np.full(len(ticket.batch), PAGE if self.answered else IN_PROGRESS, dtype=np.int32)


def ticket() -> Ticket:
    return Ticket(np.zeros(2, dtype=IOCTX_DTYPE))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=120))
def test_free_ranges_never_overlap_and_always_merge(steps: list[tuple[bool, int]]) -> None:
    free = FreeRanges(100)
    taken: list[tuple[int, int]] = []
    for give, amount in steps:
        if give and taken:
            free.give(*taken.pop(amount % len(taken)))
        else:
            start = free.take(amount)
            holes = [end - begin for begin, end in free.ranges()]
            assert start is not None or all(hole < amount for hole in holes)
            if start is not None:
                taken.append((start, amount))
        used = sorted([(start, start + size) for start, size in taken])
        cover = sorted(used + free.ranges())
        assert all(end == begin for (_, end), (begin, _) in pairwise(cover)), "overlap or leak"
        assert (cover[0][0], cover[-1][1]) == (0, 100)
        holes_at = free.ranges()
        assert all(end < begin for (_, end), (begin, _) in pairwise(holes_at)), "not merged"
    for start, size in taken:
        free.give(start, size)
    assert free.ranges() == [(0, 100)]


@given(st.lists(st.integers(1, 20 * PAGE), max_size=60))
def test_extents_are_aligned_disjoint_and_inside(sizes: list[int]) -> None:
    staging, _ = make_staging()
    extents = [extent for size in sizes if (extent := staging.acquire(size))]
    spans = sorted((extent.address, extent.address + extent.size) for extent in extents)
    assert all(start % PAGE == 0 == end % PAGE for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(staging.address <= start and end <= staging.address + staging.size for start, end in spans)
    assert staging.used == sum(extent.size for extent in extents) == staging.high_water
    for extent in extents:
        staging.release(extent)
    assert staging.used == 0
    assert staging.acquire(staging.size) is not None


def test_a_full_pool_says_none_at_once() -> None:
    staging, _ = make_staging()
    assert staging.acquire(staging.size + 1) is None
    kept = staging.acquire(staging.size)
    assert kept is not None
    assert staging.acquire(1) is None
    staging.release(kept)
    assert staging.acquire(1) is not None


def test_a_wait_for_more_than_the_pool_ends_at_once() -> None:
    staging, _ = make_staging()
    assert staging.wait(staging.size + 1, time.monotonic() + 3600) is None


def test_a_wait_ends_at_its_deadline_and_leaves_no_trace() -> None:
    staging, _ = make_staging()
    kept = staging.acquire(staging.size)
    assert staging.wait(PAGE, time.monotonic() + 0.05) is None
    assert staging.wait(PAGE, time.monotonic() - 1) is None
    staging.release(kept)
    assert staging.wait(staging.size, time.monotonic() - 1) is not None


def test_waiters_are_served_in_their_order_and_not_overtaken() -> None:
    staging, _ = make_staging()
    first_half, second_half = staging.acquire(staging.size // 2), staging.acquire(staging.size // 2)
    order: list[str] = []

    def want(name: str, size: int) -> None:
        extent = staging.wait(size, time.monotonic() + 30)
        order.append(name)
        staging.release(extent)

    threads = []
    for name, size in (("large", staging.size), ("small", PAGE)):
        threads.append(threading.Thread(target=want, args=(name, size)))
        threads[-1].start()
        while len(staging._waiting) < len(threads):
            time.sleep(0.001)
    staging.release(first_half)
    assert staging.acquire(PAGE) is None
    assert len(staging._waiting) == 2
    staging.release(second_half)
    for thread in threads:
        thread.join(30)
    assert order == ["large", "small"]
    assert staging.used == 0


def test_a_waiter_that_gives_up_lets_the_next_one_in() -> None:
    staging, _ = make_staging()
    kept = staging.acquire(staging.size // 2)
    results: list[Extent | None] = []
    large = threading.Thread(target=lambda: results.append(staging.wait(staging.size, time.monotonic() + 0.2)))
    large.start()
    while not staging._waiting:
        time.sleep(0.001)
    small = staging.wait(PAGE, time.monotonic() + 30)
    large.join(30)
    assert results == [None]
    assert small is not None
    staging.release(kept)


def test_many_threads_share_it_without_ever_sharing_a_byte() -> None:
    staging, _ = make_staging(16)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            size = int(rng.integers(1, 8)) * PAGE
            extent = staging.wait(size, time.monotonic() + 60)
            if extent is None:
                wrong.append("starved")
                return
            start = extent.address - staging.address
            memory = staging._region.view[start : start + size]
            memory[:] = seed
            time.sleep(0)
            if not (memory == seed).all():
                wrong.append("shared")
            staging.release(extent)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert staging.used == 0
    assert staging.acquire(staging.size) is not None


@pytest.mark.parametrize("sweep", ["acquire", "release", "wait"])
def test_a_quarantined_extent_comes_back_by_itself(sweep: str) -> None:
    staging, metrics = make_staging()
    drive = SlowDrive()
    stuck, other = staging.acquire(PAGE), staging.acquire(PAGE)
    staging.quarantine(stuck, drive, ticket())
    assert staging.quarantined == PAGE == metrics.value("tutti_quarantined_bytes")
    assert staging.used == 2 * PAGE
    if sweep == "wait":
        staging.release(other)
    drive.answered = True
    staging._next_sweep = 0.0
    if sweep == "acquire":
        staging.acquire(PAGE)
    elif sweep == "release":
        staging.release(other)
    else:
        assert staging.wait(staging.size, time.monotonic() + 30) is not None
    assert staging.quarantined == 0 == metrics.value("tutti_quarantined_bytes")


def test_a_waiter_gets_what_the_quarantine_gives_back() -> None:
    staging, _ = make_staging()
    drive = SlowDrive()
    staging.quarantine(staging.acquire(staging.size), drive, ticket())
    threading.Timer(0.1, setattr, (drive, "answered", True)).start()
    assert staging.wait(staging.size, time.monotonic() + 30) is not None


def test_quarantined_memory_outlives_close() -> None:
    staging, _ = make_staging()
    drive = SlowDrive()
    staging.quarantine(staging.acquire(PAGE), drive, ticket())
    staging.close()
    assert staging._region.address == staging.address
    drive.answered = True
    staging.close()
    assert staging._region.address == 0


def test_memory_in_use_outlives_close_and_no_more_is_given_out() -> None:
    staging, _ = make_staging()
    one, other = staging.acquire(PAGE), staging.acquire(PAGE)
    staging.close()
    assert staging.acquire(PAGE) is None
    assert staging.wait(PAGE, time.monotonic()) is None
    staging.release(one)
    view(other.address, PAGE)[:] = 1
    assert staging._region.address == staging.address
    staging.release(other)
    assert staging._region.address == 0


@pytest.mark.parametrize("again", [True, False])
def test_releasing_what_one_does_not_hold_is_a_bug(again: bool) -> None:
    staging, _ = make_staging()
    extent = staging.acquire(PAGE)
    if again:
        staging.release(extent)
    else:
        extent = Extent(extent.address + PAGE, PAGE)
    with pytest.raises(AssertionError, match="released twice"):
        staging.release(extent)


def test_gauges_follow_use() -> None:
    staging, metrics = make_staging()
    assert metrics.value("tutti_staging_bytes", kind="size") == staging.size
    extent = staging.acquire(staging.size // 2)
    assert metrics.value("tutti_staging_bytes", kind="used") == staging.size // 2
    staging.release(extent)
    assert metrics.value("tutti_staging_bytes", kind="used") == 0
    assert metrics.value("tutti_staging_bytes", kind="high_water") == staging.size // 2


def test_more_than_the_machine_has_is_refused_with_a_hint() -> None:
    with pytest.raises(EngineError, match="Lower staging_size"):
        Staging(1 << 60, Metrics(CollectorRegistry()))


def test_a_pool_leaves_nothing_behind() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0])

    metrics = Metrics(CollectorRegistry())
    before = mapped()
    for _ in range(10):
        staging = Staging(64 << 20, metrics)
        staging.release(staging.acquire(PAGE))
        staging.close()
    gc.collect()
    assert (mapped() - before) * PAGE < 64 << 20


def test_without_a_device_it_is_not_pinned_and_nobody_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    staging, _ = make_staging()
    assert not staging.pinned
    assert not caplog.records
    staging.close()


def test_memory_that_cannot_be_pinned_serves_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "pin", lambda *_: pinning.Pin(False, "refused by this test", lambda: None))
    staging, _ = make_staging()
    assert "refused by this test" in caplog.text
    assert not staging.pinned
    assert staging.acquire(PAGE)


def test_it_is_unpinned_once_and_before_the_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        pinning, "pin", lambda *_: pinning.Pin(True, "", lambda: seen.append(int(staging._region.view.size)))
    )
    staging, _ = make_staging()
    assert staging.pinned
    extent = staging.acquire(PAGE)
    assert extent
    staging.close()
    assert not seen, "somebody still copies out of it"
    staging.release(extent)
    staging.close()
    assert seen == [PAGES * PAGE]
