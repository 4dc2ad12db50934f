"""The mover's protocol against a controller that nobody here wrote."""

import errno
import time

import numpy as np

from tests.nvme.bench import PATIENCE, Bench, Mover, Peer, PeerMemory, mover
from tutti_sglang.engine.batch import Operation
from tutti_sglang.gio import abi
from tutti_sglang.gio.rings import Budget
from tutti_sglang.gio.vfio.iommu import address_space

MIB = 1 << 20
SIZES = (4096, 8192, 12288, 64 << 10, 128 << 10, 300 << 10, MIB)
IN_PROGRESS = -errno.EINPROGRESS


def round_trip(made: Mover, image: str, sizes: tuple[int, ...] = SIZES, shift: int = 0) -> None:
    """Writes of all sizes in one batch, then reads elsewhere into memory, compared with each other and the image."""
    total = sum(sizes)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    content = made.bench.bytes(total)
    offsets = 4 * MIB + starts
    made.region.view[shift : shift + total] = content
    assert made.run(made.batch(offsets, sizes, Operation.WRITE, shift + starts)) == list(sizes)
    assert made.run(made.batch([0], 4096, abi.FLUSH)) == [4096]
    made.region.view[:] = 0
    assert made.run(made.batch(offsets[::-1], sizes[::-1], Operation.READ, shift + starts[::-1])) == list(sizes[::-1])
    assert (made.region.view[shift : shift + total] == content).all()
    assert not made.region.view[shift + total :].any()
    first = made.limits.first_block << made.limits.block_shift
    assert made.bench.image(image, first + 4 * MIB, total) == content.tobytes()


def check_sgl_moves_all_sizes_of_4096_byte_blocks(bench: Bench) -> None:
    with mover(bench, "MAIN", 1) as made:
        assert made.limits.sgl
        assert made.limits.transfer == 128 << 10
        round_trip(made, "four")
        round_trip(made, "four", shift=64)


def check_prp_moves_all_sizes_of_4096_byte_blocks(bench: Bench) -> None:
    with mover(bench, "MAIN", 1, sgl=False) as made:
        assert not made.limits.sgl
        round_trip(made, "four")
        round_trip(made, "four", shift=64)


def check_sgl_moves_all_sizes_of_512_byte_blocks(bench: Bench) -> None:
    with mover(bench, "MAIN", 2) as made:
        round_trip(made, "half", (512, 1024, 3584, *SIZES))


def check_prp_moves_all_sizes_of_512_byte_blocks(bench: Bench) -> None:
    with mover(bench, "MAIN", 2, sgl=False) as made:
        round_trip(made, "half", (512, 1024, 3584, *SIZES), shift=128)


def check_a_drive_without_mdts_takes_large_commands(bench: Bench) -> None:
    for sgl in (True, False):
        with mover(bench, "WIDE", 1, sgl=sgl, max_io=2 * MIB) as made:
            assert made.limits.transfer == (2 * MIB if sgl else abi.PRP_MDTS)
            round_trip(made, "wide", (2 * MIB, MIB, 4096))


def check_doorbells_can_be_relayed(bench: Bench) -> None:
    with mover(bench, "MAIN", 1, relay=True) as made:
        round_trip(made, "four")
        assert made.relay is not None
        assert made.relay.rings() > 4


def joined_round_trip(made: Mover) -> None:
    """Pages side by side on the drive and anywhere in memory go out by few commands, and come back elsewhere."""
    count = 100
    content = made.bench.bytes(count * 4096).reshape(count, 4096)
    view = made.region.view[: 2 * count * 8192].reshape(2 * count, 8192)
    places = made.bench.random.permutation(2 * count)
    view[places[:count], :4096] = content
    offsets = 8 * MIB + np.arange(count) * 4096
    assert made.run(made.batch(offsets, 4096, Operation.WRITE, places[:count] * 8192), joined=True) == [4096] * count
    assert made.commands == -(-count * 4096 // made.limits.transfer)
    view[:] = 7
    assert made.run(made.batch(offsets, 4096, Operation.READ, places[count:] * 8192), joined=True) == [4096] * count
    assert (view[places[count:], :4096] == content).all()
    assert (view[places[:count]] == 7).all()
    assert (view[:, 4096:] == 7).all()


def check_joined_pages_go_by_lists_of_descriptors(bench: Bench) -> None:
    with mover(bench, "MAIN", 1) as made:
        joined_round_trip(made)
    with mover(bench, "WIDE", 1, max_io=2 * MIB) as made:
        assert made.limits.transfer == 2 * MIB
        joined_round_trip(made)


def check_an_error_stays_with_the_joined_page_it_concerns(bench: Bench) -> None:
    with mover(bench, "MAIN", 1) as made:
        batch = made.batch(4 * MIB + np.arange(6) * 4096, 4096, Operation.READ, np.arange(6)[::-1] * 8192)
        batch["address"][3] = made.region.address + made.region.size
        assert made.run(batch, joined=True) == [4096] * 3 + [-errno.EFAULT] + [4096] * 2


def check_rings_lists_and_data_may_lie_in_another_device(bench: Bench) -> None:
    for sgl, relay in ((True, False), (False, False), (True, True)):
        space = address_space()
        drive = bench.open("MAIN", 1, sgl=sgl, space=space)
        peer = Peer(space)
        memory = PeerMemory(bench, peer)
        made = Mover(bench, drive, memory=memory, relay=relay, log_entries=3)
        assert memory.used > 4 * MIB
        round_trip(made, "four")
        for _ in range(8):  # the rings come round several times
            assert made.run(made.batch(np.arange(16) * 4096, 4096, Operation.READ)) == [4096] * 16
        seen = made.region.address - peer.memory.address
        assert bench.image("peer", seen, 65536) == bench.image("four", 0, 65536) == bytes(made.region.view[:65536])
        made.close()
        drive.close()
        peer.close()


def check_many_commands_over_several_queues(bench: Bench) -> None:
    with mover(bench, "WIDE", 1, pairs=4, log_entries=3, size=MIB) as made:
        content = bench.bytes(MIB)
        made.region.view[:] = content
        assert made.run(made.batch(np.arange(256) * 4096, 4096, Operation.WRITE)) == [4096] * 256
        order = bench.random.permutation(256)
        for _ in range(4):
            made.region.view[:] = 0
            assert made.run(made.batch(order * 4096, 4096, Operation.READ, order * 4096)) == [4096] * 256
            assert (made.region.view == content).all()
        assert (made.pairs.states()["next"] > 64).all(), "every queue has come round"
        assert not made.pairs.states()["stray"].any()


def check_one_doorbell_serves_many_commands(bench: Bench) -> None:
    with mover(bench, "WIDE", 1, log_entries=6, size=MIB) as made:
        assert made.run(made.batch(np.arange(256) * 4096, 4096, Operation.READ)) == [4096] * 256
        state = made.pairs.states()[0]
        assert state["next"] == 256
        assert state["doorbells"] <= 256


def check_a_media_error_fails_its_ioctx_and_no_other(bench: Bench) -> None:
    bad = 40 * MIB  # as QEMU was told
    with mover(bench, "MAIN", 1) as made:
        results = made.run(made.batch([bad - 4096, bad, bad + 4096], 4096, Operation.READ))
        assert results == [4096, -errno.EIO, 4096]
        assert made.status[1] & 0x7FF == abi.Status.UNRECOVERED_READ
        assert made.run(made.batch([bad - 64 * 1024], 256 << 10, Operation.READ)) == [-errno.EIO]


def check_what_lies_outside_the_stores_blocks_never_reaches_the_drive(bench: Bench) -> None:
    with mover(bench, "MAIN", 1, start=8 * MIB) as made:
        end = made.limits.blocks << made.limits.block_shift
        assert end == 56 * MIB
        batch = made.batch([end - 4096, end, end - 4096, 0, 100], [4096, 4096, 8192, 4096, 4096], Operation.READ)
        batch["address"][3] += 1 << 40
        assert made.run(batch) == [4096, -errno.EBADF, -errno.EBADF, -errno.EFAULT, -errno.EINVAL]
        round_trip(made, "four")


def check_a_slow_command_is_late_and_its_memory_stays_the_drives_until_then(bench: Bench) -> None:
    with mover(bench, "SLOW", 1) as made:
        made.run(made.batch(np.arange(4) * 4096, 4096, Operation.READ))  # the drive's credit
        ids = made.start(made.batch(np.arange(4) * 4096, 4096, Operation.READ), Budget(30 * 10**9, 10**8))
        assert not made.ring.wait_cqe(ids, 0.3).all()
        results = made.ring.results(int(ids[0]))
        assert (results == IN_PROGRESS).any()
        assert made.finish(ids) == [4096] * 4
        assert made.region.view[: 4 * 4096].tobytes() == bench.image("slow", 0, 4 * 4096)


def check_a_reset_ends_commands_that_are_under_way(bench: Bench) -> None:
    with mover(bench, "SLOW", 1) as made:
        made.run(made.batch(np.arange(4) * 4096, 4096, Operation.READ))
        ids = made.start(made.batch(np.arange(8) * 4096, 4096, Operation.READ), Budget(10**7, 10**8))
        until = time.monotonic() + PATIENCE
        while not made.pairs.states()["late"].any() and time.monotonic() < until:
            time.sleep(0.01)
        assert made.twin.close(PATIENCE)
        made.drive.stop()
        context, pair = made.ring.context_address, made.pairs.table.ctypes.data
        bench.native.gio_abort_all(context, pair)
        results = made.ring.results(int(ids[0]))
        assert made.ring.complete(ids).all()
        assert set(results.tolist()) <= {4096, -errno.EIO}
        assert -errno.EIO in results.tolist()
        made.drive.restart()
        made.ring.release(ids)
        made.start_twin()
        assert made.run(made.batch([0, 4096], 4096, Operation.READ)) == [4096] * 2
