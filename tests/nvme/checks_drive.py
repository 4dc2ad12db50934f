"""A drive by itself: what it says of itself, its own reads and writes, refusals, reset."""

import os
import time

import numpy as np

from tests.nvme.bench import Bench, faults, mover
from tests.nvme.raw_commands import COMMANDS, SGL
from tutti_sglang.config import RawName
from tutti_sglang.engine.batch import Operation
from tutti_sglang.errors import EngineError
from tutti_sglang.gio.vfio.drive import VfioDrive
from tutti_sglang.gio.vfio.iommu import address_space

MIB = 1 << 20


def refused(act: object, *arguments: object) -> str:
    """What an EngineError said."""
    try:
        act(*arguments)  # type: ignore[operator]
    except EngineError as error:
        return str(error)
    raise AssertionError("it was not refused")


def check_identify_says_what_qemu_was_told(bench: Bench) -> None:
    drive = bench.open("MAIN", 1)
    facts = drive.controller.facts
    assert (facts.serial, facts.mdts, facts.sgl, facts.volatile) == ("MAIN", 128 << 10, True, True)
    assert (drive.block, drive.facts.size) == (4096, 64 * MIB)
    assert drive.controller.version == "1.4"
    drive.close()
    drive = bench.open("WIDE", 1)
    assert (drive.controller.facts.mdts, drive.block) == (0, 512)
    drive.close()


def check_of_several_namespaces_one_must_be_named(bench: Bench) -> None:
    said = refused(bench.open, "MAIN", 0)
    assert f"vfio:{bench.addresses['MAIN']}/2" in said
    assert "cannot be used" in said or "not active" in refused(bench.open, "MAIN", 9)


def check_a_second_process_is_refused_and_told_which_one_has_it(bench: Bench) -> None:
    drive = bench.open("MAIN", 1)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = refused(VfioDrive, address_space(), RawName(bench.addresses["MAIN"], 1))
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 4096).decode()
    os.waitpid(child, 0)
    os.close(reader)
    assert f"is driven by process {os.getpid()} (python" in said, said
    assert drive.read(0, 4096) == bench.image("four", 0, 4096)
    drive.close()


def check_own_blocks_are_written_and_read(bench: Bench) -> None:
    for nsid, image, block in ((1, "four", 4096), (2, "half", 512)):
        drive = bench.open("MAIN", nsid)
        for offset, size in ((0, block), (3 * block, 8192), (8 * MIB, 200 << 10), (9 * MIB, MIB)):
            content = bench.bytes(size).tobytes()
            drive.write(offset, content)
            drive.flush()
            assert bench.image(image, offset, size) == content
            assert drive.read(offset, size) == content
        drive.close()


def check_a_command_that_breaks_a_rule_is_refused_as_the_software_controller_refuses_it(bench: Bench) -> None:
    drive = bench.open("MAIN", 2)
    for raw in COMMANDS:
        sgl = raw.fields.get("flags") == SGL
        data = (drive._buffer_bus + raw.data[0], raw.data[1])
        lba = np.array([raw.fields.get("lba", 0)], dtype="<u8").view("<u4")
        words = {10: int(lba[0]), 11: int(lba[1]), 12: raw.fields.get("cdw12", 0)}
        answer = drive._queue.carry_out(words, raw.fields["opcode"] | sgl << 14, 2, data, 10)
        assert answer is not None
        assert answer.status == raw.status, f"{raw.name}: {answer.status:#x}"
    drive.close()


def check_memory_that_is_not_mapped_is_out_of_reach_and_the_drive_serves_on(bench: Bench) -> None:
    drive = bench.open("MAIN", 1)
    words = {12: 0}
    drive._queue.carry_out(words, 2, 1, (0x7000000000, 0), 10)  # QEMU says success
    time.sleep(0.5)
    assert faults(), "the kernel's log says nothing of a fault"
    assert drive.read(0, 4096) == bench.image("four", 0, 4096)
    drive.close()


def check_a_reset_leaves_a_drive_that_works(bench: Bench) -> None:
    drive = bench.open("MAIN", 1)
    before = drive.read(0, 8192)
    for _ in range(3):
        drive.restart()
        assert drive.read(0, 8192) == before
    drive.stop()
    assert drive.controller.device.reset()
    drive.restart()
    assert drive.read(0, 8192) == before
    drive.close()


def check_a_drive_is_left_disabled_and_can_be_opened_again(bench: Bench) -> None:
    for _ in range(3):
        drive = bench.open("MAIN", 1)
        assert len(drive.read(0, 4096)) == 4096
        drive.close()


def check_two_drives_of_a_process_share_one_address_space(bench: Bench) -> None:
    space = address_space()
    with mover(bench, "MAIN") as made:
        one, two = bench.open("WIDE", 1, space=space), bench.open("SLOW", 1, space=space)
        region = made.memory.shared(MIB)
        assert one.map(region, made.memory)["bus"] == two.map(region, made.memory)["bus"]
        one.close()
        two.close()
        assert made.run(made.batch([0], 4096, Operation.READ)) == [4096]


def check_memory_can_be_mapped_again_after_a_close(bench: Bench) -> None:
    for _ in range(2):
        with mover(bench, "WIDE") as made:
            assert made.run(made.batch([0], 4096, Operation.READ)) == [4096]
