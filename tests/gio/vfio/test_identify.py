"""Identify data is read as the specification lays it out, and what a store cannot live in is refused."""

import struct

import pytest

from tutti_sglang.gio.vfio import identify


def controller(mdts: int = 5, sgls: int = 1, sqes: int = 0x66, cqes: int = 0x44) -> bytes:
    data = bytearray(4096)
    data[4:24], data[24:64], data[64:72] = b"S1".ljust(20), b"A drive".ljust(40), b"1.0".ljust(8)
    data[77], data[512], data[513], data[525] = mdts, sqes, cqes, 1
    struct.pack_into("<I", data, 516, 4)
    struct.pack_into("<I", data, 536, sgls)
    return bytes(data)


def namespace(shift: int = 9, metadata: int = 0, index: int = 0, **bits: int) -> bytes:
    data = bytearray(4096)
    struct.pack_into("<Q", data, 0, bits.get("blocks", 1000))
    data[25] = 63 if index > 15 else 15
    data[26] = index & 15 | (index >> 4) << 5
    data[29], data[30], data[99] = bits.get("dps", 0), bits.get("nmic", 0), bits.get("nsattr", 0)
    struct.pack_into("<HB", data, 128 + 4 * index, metadata, shift)
    return bytes(data)


def test_a_controllers_facts() -> None:
    facts = identify.controller_facts(controller())
    assert (facts.serial, facts.model, facts.firmware) == ("S1", "A drive", "1.0")
    assert (facts.mdts, facts.sgl, facts.volatile, facts.namespaces, facts.fits) == (128 << 10, True, True, 4, True)


@pytest.mark.parametrize(("mdts", "size"), [(0, 0), (1, 8192), (9, 2 << 20)])
def test_mdts_is_in_pages_and_0_is_no_limit(mdts: int, size: int) -> None:
    assert identify.controller_facts(controller(mdts=mdts)).mdts == size


@pytest.mark.parametrize(
    ("sgls", "used"), [(0, False), (1, True), (2, True), (3, False), (0x80001, True), (0x10000, False)]
)
def test_sgls_are_used_when_the_lowest_bits_say_so(sgls: int, used: bool) -> None:
    assert identify.controller_facts(controller(sgls=sgls)).sgl is used


@pytest.mark.parametrize(("sqes", "cqes"), [(0x77, 0x44), (0x55, 0x44), (0x66, 0x55)])
def test_queue_entries_of_other_sizes_do_not_fit(sqes: int, cqes: int) -> None:
    assert not identify.controller_facts(controller(sqes=sqes, cqes=cqes)).fits
    assert identify.controller_facts(controller(sqes=0x76, cqes=0x54)).fits


@pytest.mark.parametrize("index", [0, 3, 15, 16, 37])
def test_the_format_in_use_is_found(index: int) -> None:
    facts = identify.namespace_facts(namespace(shift=12, index=index))
    assert facts.block_shift == 12
    assert facts.size == 4096 * 1000
    assert not facts.problem()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blocks": 0}, "not active"),
        ({"shift": 13}, "blocks have 8192 bytes"),
        ({"metadata": 8}, "metadata"),
        ({"dps": 1}, "protection information"),
        ({"nsattr": 1}, "write protected"),
    ],
)
def test_what_a_store_cannot_live_in_is_refused(changes: dict[str, int], said: str) -> None:
    assert said in identify.namespace_facts(namespace(**changes)).problem()


def test_active_namespaces_end_with_the_first_zero() -> None:
    assert identify.active_namespaces(struct.pack("<4I", 1, 2, 7, 0).ljust(4096, b"\0")) == [1, 2, 7]
