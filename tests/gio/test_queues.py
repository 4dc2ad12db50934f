"""Single steps of the protocol: command slots, doorbells, PRP lists, and what a reset leaves."""

import ctypes
import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import Faults, SoftwareController
from tutti_sglang.gio.queues import HostMemory, Limits, QueuePairs, prp_table
from tutti_sglang.gio.twin import Bell, Twin
from tutti_sglang.testing.gio_rig import GioRig, Shape


def pair_address(pairs: QueuePairs, pair: int = 0) -> int:
    return int(pairs.table.ctypes.data) + pair * abi.PAIR_DTYPE.itemsize


@pytest.mark.parametrize("log_entries", range(1, 11))
@pytest.mark.parametrize("hint", [0, 1, 7, 1 << 31])
def test_every_identifier_is_given_once(native: ctypes.CDLL, log_entries: int, hint: int) -> None:
    memory = HostMemory()
    pairs = QueuePairs(memory, 1, log_entries)
    pair, usable = pair_address(pairs), (1 << log_entries) - 1
    given_out = [native.gio_claim(pair, hint) for _ in range(usable)]
    assert sorted(given_out) == list(range(usable))
    assert native.gio_claim(pair, hint) == -1
    for cid in given_out[:: max(1, usable // 3)]:
        native.gio_free(pair, cid)
        assert native.gio_claim(pair, hint + 1) == cid
    assert native.gio_claim(pair, hint) == -1


def test_one_doorbell_announces_all_that_lies_ready(native: ctypes.CDLL) -> None:
    memory = HostMemory()
    pairs = QueuePairs(memory, 1, 3)
    pair, state, doorbells = pair_address(pairs), pairs.states()[0], pairs.doorbells.view.view(np.uint32)
    sqe = np.zeros(1, dtype=abi.SQE_DTYPE)
    state["sq_lock"] = 1  # another thread is about to announce
    for cid in range(5):
        sqe["cid"] = cid
        native.gio_submit(pair, sqe.ctypes.data)
    assert (state["next"], state["tail"], state["doorbells"], doorbells[0]) == (5, 0, 0, 0)
    state["sq_lock"] = 0
    native.gio_announce(pair)
    assert (state["next"], state["tail"], state["doorbells"], doorbells[0]) == (5, 5, 1, 5)
    assert pairs.sq.view[:320].view(abi.SQE_DTYPE)["cid"].tolist() == [0, 1, 2, 3, 4]


def test_a_gap_holds_up_what_comes_after_it(native: ctypes.CDLL) -> None:
    """A ticket whose SQE is not written yet: the controller must not hear of later ones."""
    memory = HostMemory()
    pairs = QueuePairs(memory, 1, 3)
    pair, state = pair_address(pairs), pairs.states()[0]
    sqe = np.zeros(1, dtype=abi.SQE_DTYPE)
    native.gio_submit(pair, sqe.ctypes.data)
    state["next"] += 1  # another thread has ticket 1
    native.gio_submit(pair, sqe.ctypes.data)
    assert (state["next"], state["tail"]) == (3, 1)
    state["ready"][1] = 2
    native.gio_announce(pair)
    assert state["tail"] == 3


@given(size=st.integers(1, 3000), first=st.integers(0, 2999), count=st.integers(1, abi.PRP_WINDOW))
def test_every_run_of_pages_has_its_list(size: int, first: int, count: int) -> None:
    bus = 7 << 40
    table = prp_table(bus, size * abi.PAGE)
    first %= size
    count = min(count, size - first)
    row, entry = divmod(first, abi.PRP_WINDOW)
    assert entry + count < table.shape[1]  # not the last entry of its page
    assert table[row, entry : entry + count].tolist() == [bus + (first + i) * abi.PAGE for i in range(count)]
    assert set(table[table < bus].tolist()) <= {0}
    assert int(table.max()) == bus + (size - 1) * abi.PAGE


@pytest.mark.parametrize(
    ("limits", "transfer"),
    [
        (Limits(1, mdts=128 << 10), 128 << 10),
        (Limits(1, mdts=0), 32 << 20),
        (Limits(1, mdts=0, block_shift=12), 256 << 20),
        (Limits(1, mdts=2 << 20, sgl=False), 1 << 20),
        (Limits(1, mdts=64 << 10, sgl=False), 64 << 10),
    ],
)
def test_a_transfer_fits_mdts_block_count_and_prp_lists(limits: Limits, transfer: int) -> None:
    assert limits.transfer == transfer


def test_a_reset_ends_every_command_and_the_pair_is_as_new(native: ctypes.CDLL, tmp_path: Path) -> None:
    rig = GioRig(tmp_path, native, HostMemory(), Shape(pairs=1))
    rig.controller.set_faults(Faults(drop=0.5, seed=1))
    bell = Bell(native)
    twin = Twin(native, rig.ring, [rig.controller], bell)
    ids = rig.issue(rig.batch(np.arange(20) * 4096))
    assert not rig.ring.wait_cqe(ids, 0.3).any()
    assert rig.controller.close(60)
    assert twin.close(60)
    native.gio_abort_all(rig.ring.context.ctypes.data, pair_address(rig.pairs))
    assert rig.ring.complete(ids).all()
    results, status = rig.ring.results(int(ids[0])), rig.ring.status(int(ids[0]))
    assert set(results.tolist()) == {4096, -errno.EIO}
    assert set(status.tolist()) == {0, abi.Status.ABORTED_SQ_DELETION}
    rig.ring.release(ids)
    state = rig.pairs.states()[0]
    for word in ("next", "tail", "head", "late", "in_use", "ready"):
        assert not state[word].any(), word

    rig.pairs.doorbells.view[:] = 0
    rig.controller = SoftwareController(native, rig.limits, rig.pairs, rig.shape.segment)
    rig.controller.map(rig.regions[:1])
    rig.controller.attach(0, rig.fds[0])
    rig.controller.start()
    twin = Twin(native, rig.ring, [rig.controller], bell)
    assert rig.run(rig.batch(np.arange(20) * 4096)).tolist() == [4096] * 20
    rig.close()
    assert twin.close(60)
    bell.close()
