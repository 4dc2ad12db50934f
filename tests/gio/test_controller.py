"""The software controller refuses what a drive refuses, by the status that the specification names."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nvme.raw_commands import COMMANDS, Raw
from tutti_sglang.gio import abi
from tutti_sglang.gio.abi import Status
from tutti_sglang.gio.controller import Faults, Service
from tutti_sglang.gio.queues import HostMemory
from tutti_sglang.testing.gio_rig import BUS, GioRig, Shape

READ, WRITE, FLUSH = 2, 1, 0
SGL = 1 << 6
PATIENCE = 60_000

Start = Callable[..., "Drive"]


class Drive:
    """A rig without a mover: commands are written by hand, one after the other, into one queue pair."""

    def __init__(self, rig: GioRig) -> None:
        self.rig = rig
        self.entries = 1 << rig.shape.log_entries
        self.sq = rig.pairs.sq.view[: self.entries * 64].view(abi.SQE_DTYPE)
        self.cq = rig.pairs.cq.view[: self.entries * 16].view(abi.CQE_DTYPE)
        self.doorbells = rig.pairs.doorbells.view.view(np.uint32)
        self.tail = self.head = 0
        self.data = rig.region.address + BUS

    def put(self, **fields: Any) -> None:
        """Add a command; by default a read of the first block by SGL."""
        sqe = self.sq[self.tail % self.entries]
        self.rig.pairs.sq.view[self.tail % self.entries * 64 :][:64] = 0
        values = {"opcode": READ, "flags": SGL, "nsid": 1, "data": (self.data, 512), "cid": self.tail % self.entries}
        for name, value in (values | fields).items():
            sqe[name] = value
        self.tail += 1

    def announce(self) -> None:
        self.doorbells[0] = self.tail % self.entries
        self.rig.controller.wake()

    def take(self) -> tuple[int, int]:
        """(cid, status) of the next completion."""
        phase = 1 - self.head // self.entries % 2
        for _ in range(PATIENCE):
            last = int(self.cq["last"][self.head % self.entries])
            if last >> 16 & 1 == phase:
                self.head += 1
                self.doorbells[16] = self.head % self.entries
                return last & 0xFFFF, last >> 17
            ctypes.CDLL(None).usleep(1000)
        raise TimeoutError

    def ask(self, **fields: Any) -> int:
        """The status of one command."""
        self.put(**fields)
        self.announce()
        return self.take()[1]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(PATIENCE):
        if condition():
            return
        ctypes.CDLL(None).usleep(1000)
    raise TimeoutError


@pytest.fixture
def start(native: ctypes.CDLL, tmp_path: Path) -> Iterator[Start]:
    made: list[GioRig] = []

    def start(service: Service = Service(), **shape: Any) -> Drive:  # noqa: B008
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(GioRig(folder, native, HostMemory(), Shape(pairs=1, **shape), service))
        return Drive(made[-1])

    yield start
    for rig in made:
        rig.close()


BLOCKS = 2 * (1 << 20) // 512
REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "an unknown opcode": (Status.INVALID_OPCODE, {"opcode": 9}),
    "a fused command": (Status.INVALID_FIELD, {"flags": SGL | 1}),
    "a metadata SGL": (Status.INVALID_FIELD, {"flags": 2 << 6}),
    "a reserved PSDT": (Status.INVALID_FIELD, {"flags": 3 << 6}),
    "another namespace": (Status.INVALID_NAMESPACE, {"nsid": 2}),
    "all namespaces": (Status.INVALID_NAMESPACE, {"nsid": 0xFFFFFFFF}),
    "the block after the last": (Status.LBA_OUT_OF_RANGE, {"lba": BLOCKS}),
    "a range over the end": (Status.LBA_OUT_OF_RANGE, {"lba": BLOCKS - 1, "cdw12": 1, "data": (0, 1024)}),
    "a block beyond everything": (Status.LBA_OUT_OF_RANGE, {"lba": (1 << 64) - 1}),
    "more than MDTS": (Status.INVALID_FIELD, {"cdw12": 128, "data": (0, 129 * 512)}),
    "an SGL that is too short": (Status.SGL_LENGTH_INVALID, {"data": (0, 511)}),
    "an SGL that is too long": (Status.SGL_LENGTH_INVALID, {"data": (0, 1024)}),
    "a bit bucket": (Status.SGL_TYPE_INVALID, {"data": (0, 512 | 1 << 60)}),
    "an SGL segment of nothing": (Status.INVALID_SGL_SEGMENT, {"data": (4096, 3 << 60)}),
    "an SGL segment of half a descriptor": (Status.INVALID_SGL_SEGMENT, {"data": (4096, 24 | 3 << 60)}),
    "an SGL segment off a qword": (Status.INVALID_SGL_SEGMENT, {"data": (4100, 32 | 3 << 60)}),
    "an SGL segment that is not mapped": (Status.DATA_TRANSFER_ERROR, {"data": (8 << 20, 32 | 3 << 60)}),
    "an SGL segment that goes on without saying where": (Status.INVALID_SGL_SEGMENT, {"data": (4096, 32 | 2 << 60)}),
    "an SGL segment with less than the command moves": (Status.SGL_LENGTH_INVALID, {"data": (4096, 32 | 3 << 60)}),
    "an offset for an address": (Status.SGL_TYPE_INVALID, {"data": (0, 512 | 1 << 56)}),
    "memory that is not mapped": (Status.DATA_TRANSFER_ERROR, {"data": (8 << 20, 512)}),
    "memory that ends too early": (Status.DATA_TRANSFER_ERROR, {"data": ((4 << 20) - 256, 512)}),
    "an address of the host": (Status.DATA_TRANSFER_ERROR, {"data": (-BUS, 512)}),
    "a PRP1 off a dword": (Status.PRP_OFFSET_INVALID, {"flags": 0, "data": (2, 0)}),
    "a PRP2 inside a page": (Status.PRP_OFFSET_INVALID, {"flags": 0, "cdw12": 15, "data": (0, 4096 + 512)}),
    "a PRP list off a qword": (Status.PRP_OFFSET_INVALID, {"flags": 0, "cdw12": 31, "data": (0, 4)}),
    "a PRP1 that is not mapped": (Status.DATA_TRANSFER_ERROR, {"flags": 0, "data": (8 << 20, 0)}),
    "a PRP list that is not mapped": (Status.DATA_TRANSFER_ERROR, {"flags": 0, "cdw12": 31, "data": (0, 8)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_a_rule_is_refused(start: Start, case: str) -> None:
    drive = start()
    status, fields = REFUSED[case]
    if "data" in fields:  # from the start of the data region; a PRP2 from the bus address 0
        first, second = fields["data"]
        whole_page = fields.get("cdw12") == 15
        fields = fields | {"data": (drive.data + first, second + drive.data if whole_page else second)}
    before = drive.rig.region.view.copy()
    assert drive.ask(**fields) == status
    assert drive.ask() == Status.SUCCESS  # and the next is served
    assert (drive.rig.region.view[512:] == before[512:]).all()


BLOCK, POINTER, LAST = 0, 2 << 60, 3 << 60


def test_an_sgl_goes_through_as_many_segments_as_it_has(start: Start) -> None:
    """And a segment over as many pages: one of 300 descriptors here, then two, then one that moves nothing."""
    drive = start(mdts=1 << 20)
    rig, lists = drive.rig, drive.rig.region.view[2 << 20 :].view(np.uint64).reshape(-1, 2)
    at = drive.data + (2 << 20)
    order = np.random.default_rng(0).permutation(302)
    lists[:302] = np.column_stack([drive.data + order.astype(np.uint64) * 512, np.full(302, 512)])
    lists[302:305] = lists[299:302]
    lists[299] = at + 302 * 16, 3 * 16 | POINTER  # the last of its segment
    lists[304] = at + 400 * 16, 2 * 16 | LAST
    lists[400] = drive.data + 301 * 512, 0
    lists[401] = drive.data + int(order[301]) * 512, 512
    assert drive.ask(cdw12=301, data=(at, 300 * 16 | POINTER)) == Status.SUCCESS
    moved = rig.region.view[: 302 * 512].reshape(302, 512)
    assert (moved[order] == rig.content[: 302 * 512].reshape(302, 512)).all()


WRONG_LISTS = {
    "too much": (Status.SGL_LENGTH_INVALID, [(0, 512), (512, 512)]),
    "too little": (Status.SGL_LENGTH_INVALID, [(0, 256)]),
    "a pointer in the middle": (Status.INVALID_SGL_COUNT, [(0, LAST | 16), (0, 512)]),
    "a pointer at the end of the last": (Status.INVALID_SGL_COUNT, [(0, 512), (4096, POINTER | 16)]),
    "another type": (Status.SGL_TYPE_INVALID, [(0, 512 | 1 << 60)]),
    "memory that is not mapped": (Status.DATA_TRANSFER_ERROR, [(0, 256), (8 << 20, 256)]),
}


@pytest.mark.parametrize("case", WRONG_LISTS)
def test_an_sgl_that_breaks_a_rule_is_refused(start: Start, case: str) -> None:
    drive = start()
    status, descriptors = WRONG_LISTS[case]
    lists = drive.rig.region.view[4096:8192].view(np.uint64).reshape(-1, 2)
    for place, (address, word) in enumerate(descriptors):
        lists[place] = drive.data + address, word
    assert drive.ask(data=(drive.data + 4096, len(descriptors) * 16 | LAST)) == status
    assert drive.ask() == Status.SUCCESS


def test_a_chain_of_segments_that_has_no_end_is_refused(start: Start) -> None:
    drive = start()
    lists = drive.rig.region.view[4096:8192].view(np.uint64).reshape(-1, 2)
    lists[0] = drive.data + 4096, 16 | POINTER
    assert drive.ask(data=(drive.data + 4096, 16 | POINTER)) == Status.INVALID_SGL_COUNT


def test_without_sgl_support_sgls_are_refused(start: Start) -> None:
    drive = start(sgl=False)
    assert drive.ask() == Status.INVALID_FIELD
    assert drive.ask(flags=0, data=(drive.data, 0)) == Status.SUCCESS


def test_a_segment_without_a_file_has_no_blocks(start: Start) -> None:
    drive = start()
    assert drive.rig.controller.detach(1, 60)
    assert drive.ask(lba=BLOCKS // 2) == Status.UNWRITTEN_BLOCK
    assert drive.ask(lba=BLOCKS // 2 - 1, cdw12=1, data=(drive.data, 1024)) == Status.UNWRITTEN_BLOCK


def test_flush_takes_all_namespaces(start: Start) -> None:
    drive = start()
    assert drive.ask(opcode=FLUSH, flags=0, nsid=0xFFFFFFFF) == Status.SUCCESS
    assert drive.ask(opcode=FLUSH, flags=0) == Status.SUCCESS


def test_a_forced_write_is_written(start: Start) -> None:
    drive = start()
    drive.rig.region.view[:512] = 5
    assert drive.ask(opcode=WRITE, cdw12=1 << 30) == Status.SUCCESS
    assert (drive.rig.on_disk()[:512] == 5).all()


def test_a_prp_list_goes_on_in_a_further_page(start: Start) -> None:
    """By the specification the last entry of a page points on when more are needed, and is data when not."""
    drive = start(mdts=1 << 20)
    rig = drive.rig
    lists = rig.region.view[1 << 20 : (1 << 20) + 8192].view(np.uint64)
    pages = drive.data + np.arange(8, dtype=np.uint64) * 4096
    lists[510], lists[511] = pages[1], drive.data + (1 << 20) + 4096
    lists[512:515] = pages[2:5]
    assert drive.ask(flags=0, cdw12=39, data=(drive.data, drive.data + (1 << 20) + 510 * 8)) == Status.SUCCESS
    assert (rig.region.view[: 5 * 4096] == rig.content[: 5 * 4096]).all()
    lists[511] = pages[5]
    assert drive.ask(flags=0, cdw12=23, lba=8, data=(drive.data, drive.data + (1 << 20) + 510 * 8)) == Status.SUCCESS
    assert (rig.region.view[5 * 4096 : 6 * 4096] == rig.content[12288:16384]).all()
    lists[511] += 512
    assert (
        drive.ask(flags=0, cdw12=23, data=(drive.data, drive.data + (1 << 20) + 510 * 8)) == Status.PRP_OFFSET_INVALID
    )


def test_an_identifier_in_use_is_refused(start: Start) -> None:
    drive = start()
    drive.rig.controller.set_faults(Faults(drop=1.0, writes=False))
    drive.put(cid=3)
    drive.put(cid=3, opcode=WRITE)
    drive.announce()
    assert drive.take() == (3, Status.COMMAND_ID_CONFLICT)


def test_a_doorbell_past_the_queue_is_fatal(start: Start) -> None:
    drive = start()
    assert drive.ask() == Status.SUCCESS
    assert drive.rig.controller.counts()["fatal"] == 0
    drive.doorbells[0] = drive.entries
    drive.rig.controller.wake()
    until(lambda: drive.rig.controller.counts()["fatal"] == 1)


def test_it_waits_for_room_in_the_completion_queue(start: Start) -> None:
    """More completions than entries: nothing is overwritten, and all come once the head moves."""
    drive = start(log_entries=2)
    for _ in range(3):
        drive.put()
    drive.announce()
    until(lambda: bool(drive.cq["last"][:3].all()))  # full: one entry of a ring stays empty
    for cid in (3, 4):
        drive.put(cid=cid)
    drive.announce()
    until(lambda: drive.rig.controller.counts()["commands"] == 5)
    ctypes.CDLL(None).usleep(20_000)
    assert drive.cq["last"][3] == 0
    assert sorted(drive.take()[0] for _ in range(5)) == [0, 1, 2, 3, 4]


def statuses(drive: Drive, faults: Faults) -> list[int]:
    drive.rig.controller.set_faults(faults)
    return [drive.ask() for _ in range(100)]


def test_faults_are_drawn_from_the_seed(start: Start) -> None:
    one, other = start(), start()
    faults = Faults(seed=3, fail=0.3)
    first = statuses(one, faults)
    assert first == statuses(other, faults)
    assert first != statuses(one, Faults(seed=4, fail=0.3))
    assert 10 < first.count(Status.UNRECOVERED_READ) < 50
    assert statuses(one, Faults(seed=3, fail=0.3, reads=False)) == [Status.SUCCESS] * 100


def test_delayed_answers_are_overtaken(start: Start) -> None:
    drive = start(Service(workers=0))
    drive.rig.controller.set_faults(Faults(delay=0.5, delay_seconds=0.5))
    for _ in range(16):
        drive.put()
    drive.announce()
    seen = [drive.take()[0] for _ in range(16)]
    assert sorted(seen) == list(range(16))
    assert seen != sorted(seen)


def test_dropped_answers_come_when_released(start: Start) -> None:
    drive = start()
    drive.rig.controller.set_faults(Faults(drop=1.0))
    for _ in range(5):
        drive.put()
    drive.announce()
    until(lambda: drive.rig.controller.counts()["dropped"] == 5)
    assert drive.rig.controller.release_dropped() == 5
    assert sorted(drive.take() for _ in range(5)) == [(cid, Status.SUCCESS) for cid in range(5)]


@pytest.mark.parametrize("raw", COMMANDS, ids=lambda raw: raw.name)
def test_it_answers_as_a_controller_that_others_wrote(start: Start, raw: Raw) -> None:
    drive = start(mdts=128 << 10)
    assert drive.ask(**{"flags": 0} | raw.fields, data=(drive.data + raw.data[0], raw.data[1])) == raw.status
