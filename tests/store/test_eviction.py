"""The policy: cold objects go, tails before heads, a scan makes room for itself, namespaces share."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import policies, traces
from tutti_sglang.store.allocation import Usage
from tutti_sglang.store.eviction import (
    COLD_SHARE,
    HITS_MAX,
    IDLE_SECONDS,
    WINDOW_MAX,
    Share,
    Sweep,
    aged,
    cooled,
    donor,
    order,
    surplus,
    window_size,
)

GIB = 1 << 30


def _array(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


NONE = _array()


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    slots, depths = _array(10, 11, 12, 13), _array(2, 9, 0, 5)
    assert depths[order(slots, depths, hot=NONE, group=1)].tolist() == [9, 5, 2, 0]


def test_whole_groups_go_first_and_together() -> None:
    slots, depths = _array(0, 1, 2, 3, 4, 5, 8, 9), _array(7, 6, 1, 2, 30, 31, 20, 21)
    gone = slots[order(slots, depths, hot=_array(6), group=2)]  # 6 and 7 are one group, 4 and 5 another
    assert gone.tolist() == [5, 4, 9, 8, 0, 1, 3, 2]
    gone = slots[order(slots, depths, hot=_array(5), group=4)]
    assert gone.tolist() == [9, 8, 0, 1, 3, 2, 5, 4], "the group of 5 is in use: its cold slots go last"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5), st.booleans()), unique_by=lambda row: row[0]))
def test_all_that_is_cold_and_nothing_else_can_go(rows: list[tuple[int, int, bool]]) -> None:
    cold = [row for row in rows if row[2]]
    slots, depths = _array(*(row[0] for row in cold)), _array(*(row[1] for row in cold))
    sweep = Sweep(slots, depths, _array(*(row[0] for row in rows if not row[2])), 4)
    gone: list[int] = []
    while len(sweep):
        gone += sweep.slots[sweep.take(3, np.zeros(len(slots), np.uint8))].tolist()
    assert sorted(gone) == sorted(slots.tolist())


def test_what_is_hit_while_the_hand_is_there_is_spared() -> None:
    sweep = Sweep(_array(1, 2, 3), _array(1, 2, 3), NONE, 1)
    assert sweep.slots[sweep.take(1, np.array([0, 0, 1], np.uint8))].tolist() == [2]
    assert sweep.slots[sweep.take(9, np.array([1, 1, 1], np.uint8))].tolist() == []
    assert len(sweep) == 0


def test_hits_are_taken_only_while_too_few_objects_are_cold() -> None:
    hits = np.array([0, 1, 2], np.uint8)
    enough = round(100 * (1 - COLD_SHARE))
    assert aged(hits, 100, enough) is hits
    assert aged(hits, 100, enough + 1).tolist() == [0, 0, 1]


def test_after_a_few_turns_everything_is_cold() -> None:
    hits = np.full(8, HITS_MAX, np.uint8)
    for _ in range(HITS_MAX):
        hits = aged(hits, 8, int(np.count_nonzero(hits)))
    assert (hits == 0).sum() >= COLD_SHARE * 8


def test_a_window_is_a_share_of_the_slots_and_bounded() -> None:
    assert [window_size(slots) for slots in (1, 7, 8, 800)] == [1, 1, 1, 100]
    assert window_size(10**9) == WINDOW_MAX


@pytest.mark.parametrize("admission", ["all", "second"])
def test_a_scan_does_not_flush_what_is_reused(admission: str) -> None:
    """A third of the slots hold prompts that come again and again; then ten times as much is read once."""
    reused = [list(range(start, start + 20)) for start in range(0, 400, 20)]
    trace = [traces.Request(pages) for pages in reused * 4]
    scan = [traces.Request(list(range(10**6 + n * 50, 10**6 + n * 50 + 50))) for n in range(240)]
    kept = {}
    for name, make in (("clock", policies.Clock), ("lru", policies.Lru)):
        cache = make(1200, trace + scan, **({"admission": admission} if name == "clock" else {}))
        policies.hit_rate(cache, trace)
        policies.hit_rate(cache, [request._replace(counted=True) for request in scan])
        kept[name] = sum(policies.hit_rate(cache, [request]) for request in trace[:20]) / 20
    assert kept["clock"] == 1
    assert kept["lru"] == 0, "the scan is long enough to tell"


@pytest.mark.parametrize("name", ["chat", "mooncake"])
def test_reuse_is_served_about_as_well_as_by_lru(name: str) -> None:
    trace = {"chat": traces.chat, "mooncake": traces.mooncake}[name]()[:1500]
    capacity = int(0.3 * len({page for pages, _ in trace for page in pages}))
    clock, lru, best = (
        policies.hit_rate(make(capacity, trace), trace) for make in (policies.Clock, policies.Lru, policies.Belady)
    )
    assert lru - 0.02 < clock < best


def test_no_policy_beats_the_optimum_and_none_loses_a_page() -> None:
    trace = traces.with_scan(traces.documents(requests=120))
    rates = {make: policies.hit_rate(make(600, trace), trace) for make in (policies.Clock, policies.Lru, policies.Fifo)}
    assert max(rates.values()) <= policies.hit_rate(policies.Belady(600, trace), trace)
    everything = sum(len(pages) for pages, _ in trace)
    assert policies.hit_rate(policies.Clock(everything, trace), trace) == pytest.approx(
        policies.hit_rate(policies.Lru(everything, trace), trace)
    )


def test_watermarks() -> None:
    def usage(used: int, leased: int, slots: int = 100) -> Usage:
        return Usage(1, slots, slots - used - leased, 0, leased)

    assert surplus(usage(95, 0), 0.9, 0.95) == 0
    assert surplus(usage(95, 5), 0.9, 0.95) == 0
    assert surplus(usage(96, 0), 0.9, 0.95) == 6
    assert surplus(usage(100, 0), 1.0, 1.0) == 0
    assert surplus(Usage(0, 0, 0, 0, 0), 0.9, 0.95) == 0
    assert [surplus(usage(slots, 0, slots), 0.97, 0.99) for slots in (1, 4, 32, 100, 1000)] == [0, 0, 0, 3, 30]


def test_a_newcomer_gets_half_of_its_fair_share_from_a_full_store() -> None:
    assert donor([Share(1, 10 * GIB, 50 * GIB), Share(2, 0)], 2, GIB) == 1
    assert donor([Share(1, 9 * GIB, 50 * GIB), Share(2, 1 * GIB)], 2, GIB) == 1
    assert donor([Share(1, 8 * GIB, 50 * GIB), Share(2, 2 * GIB)], 2, GIB) is None
    assert donor([Share(1, 10 * GIB, 50 * GIB)], 2, GIB) == 1, "one that the index does not know yet"


def test_a_namespace_that_nobody_uses_gives_all_it_has() -> None:
    unused = Share(1, 1 * GIB, 90 * GIB, IDLE_SECONDS)
    assert donor([unused, Share(2, 9 * GIB, 9 * GIB)], 2, GIB) == 1
    assert donor([unused._replace(size=0), Share(2, 10 * GIB, 9 * GIB)], 2, GIB) is None


def test_a_denser_namespace_grows_but_leaves_half_of_the_fair_share() -> None:
    assert donor([Share(1, 5 * GIB, 1 * GIB), Share(2, 5 * GIB, 9 * GIB)], 2, GIB) == 1
    assert donor([Share(1, 3 * GIB, 1 * GIB), Share(2, 7 * GIB, 90 * GIB)], 2, GIB) is None
    assert donor([Share(1, 5 * GIB, 5 * GIB), Share(2, 5 * GIB, 9 * GIB)], 2, GIB) is None, "not by so little"


def test_the_unused_and_the_least_dense_give_first() -> None:
    shares = [Share(1, 4 * GIB, 3 * GIB), Share(2, 4 * GIB, 1 * GIB), Share(3, 0)]
    assert donor(shares, 3, GIB) == 2
    assert donor([shares[0]._replace(idle=IDLE_SECONDS), *shares[1:]], 3, GIB) == 1


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), min_size=2, max_size=5))
def test_segments_come_to_rest(rows: list[tuple[int, int]]) -> None:
    """Everybody wants room all the time, and is hit in proportion to what it has."""
    sizes = [size for size, _ in rows]
    assume(sum(sizes) >= len(rows))
    last, limit = 0, 5 * len(rows) * (1 + sum(sizes))
    for turn in range(2 * limit):
        taker = turn % len(rows)
        shares = [Share(n, sizes[n], float(density * sizes[n])) for n, (_, density) in enumerate(rows)]
        giver = donor(shares, taker, 1)
        if giver is not None:
            sizes[giver] -= 1
            sizes[taker] += 1
            last = turn
            assert sizes[giver] >= 0
    assert last < limit, "segments move for ever"


def test_heat_cools() -> None:
    assert cooled(8.0, 0) == 8.0
    assert cooled(8.0, 3600) == 4.0
    assert cooled(8.0, -5) == 8.0, "a clock that was set back"
    assert math.isclose(cooled(8.0, 10**9), 0)
