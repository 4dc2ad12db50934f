"""docs/format.md says what lies on the drives."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from tests.store.kit import TENSORS, close_good, keys, namespace, open_store, store_pages
from tutti_sglang.geometry import ALIGNMENT, GROUP_TARGET, Geometry, group_size
from tutti_sglang.store import directory, eviction, owners, probe, schema, superblock
from tutti_sglang.store.index import RECORD_DTYPE
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.segments import file_name
from tutti_sglang.store.slots import SEGMENT_SHIFT, SLOTS_MAX
from tutti_sglang.store.superblock import Superblock

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def section(title: str) -> str:
    """The text below a heading."""
    return next(part for part in PAGE.split("\n## ") if part.startswith(title + "\n"))


def rows(title: str) -> list[list[str]]:
    """Cells of the table rows of a section whose first cell is code; without the code marks there."""
    lines = [line.strip().strip("|") for line in section(title).splitlines() if line.startswith("| `")]
    found = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [[row[0].strip("`"), *row[1:]] for row in found]


def test_the_index_has_the_tables_and_columns_of_the_page(tmp_path: Path) -> None:
    connection = schema.open_database(tmp_path / "index.db")
    columns = [
        (f"{table}.{name}", kind.lower())
        for (table,) in connection.execute("select name from sqlite_schema where type = 'table' order by rowid")
        if not table.startswith("sqlite_")
        for _, name, kind, *_ in connection.execute(f"pragma table_info({table})")
    ]
    connection.close()
    shown = [(row[0], row[1]) for row in rows("Index") if "." in row[0]]
    assert shown == columns
    assert f"0x{schema.APPLICATION:08x}" in section("Index")


def test_the_record_has_the_fields_of_the_page() -> None:
    shown = [(row[0], row[1]) for row in rows("Index") if "." not in row[0]]
    stored = [(name, f"u{RECORD_DTYPE[name].itemsize * 8}") for name in RECORD_DTYPE.names[1:]]
    assert shown == stored
    size = sum(RECORD_DTYPE[name].itemsize for name, _ in stored)
    assert f"blob | {size} bytes, below" in section("Index")
    assert f"blob | {4 + KEY_SIZE} bytes: the namespace's number" in section("Index")
    assert SLOTS_MAX < 1 << SEGMENT_SHIFT == 1 << 24


def test_a_root_is_made_as_the_page_says(disk: Path) -> None:
    assert "XXH3-64 of its namespace's number, as u64, and its key" in section("Checksums")
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, 7)
    (record,) = store._parts.index.lookup(ns, keys(7)).records
    row = (disk / "sums" / "000001.sum").read_bytes()[: 8 * len(TENSORS)]
    mark = xxh3_64_intdigest(ns.to_bytes(8, "little") + keys(7))
    assert record["root"] == xxh3_64_intdigest(row) ^ mark
    close_good(store)


def test_the_superblock_has_the_fields_of_the_page(tmp_path: Path) -> None:
    assert [row[0] for row in rows("Superblock")] == list(Superblock.__struct_fields__)
    block = Superblock(format=superblock.FORMAT, store="a" * 32, drive=0, segment_size=1 << 20)
    assert superblock.parse(msgspec.json.encode(block.sealed()), "here").segment_size == 1 << 20
    assert superblock.FORMAT == schema.FORMAT == 3
    assert superblock.DRIVES_MAX - 1 == 65535


def test_a_namespace_has_the_fields_of_the_page() -> None:
    assert [row[0] for row in rows("Namespace")] == list(Namespace.__struct_fields__)


def test_an_owner_has_the_fields_of_the_page() -> None:
    assert [int(row[0]) for row in rows("Owners")] == [0, 8, 16, owners._NOTE_AT]
    assert [row[1] for row in rows("Owners")][:3] == [{"Q": "u64", "d": "f64"}[c] for c in owners._STATE.format[1:]]


def test_the_files_of_a_store_are_those_of_the_page(disk: Path) -> None:
    store = open_store(disk / "drive", index_dir=str(disk / "index"))
    store_pages(store, store.attach(namespace()), *range(3))
    files = [path.relative_to(disk) for path in disk.rglob("*") if path.is_file()]
    close_good(store)
    shown = {row[0] for row in rows("Files")} | set(re.findall(r"`(index\.db-\w+)`", section("Files")))
    patterns = [
        re.escape(each).replace("NNNNNN", r"\d{6,}").replace(re.escape("<uuid>"), "[0-9a-f]{32}") for each in shown
    ]
    patterns = [each.replace(r"\*", ".+") for each in patterns]
    unknown = [file for file in files if not any(re.fullmatch(each, str(Path(*file.parts[1:]))) for each in patterns)]
    assert not unknown
    names = {each.split("/")[0] for each in shown}
    assert names == set(directory._OWN) | {directory.INDEX, directory.INDEX + "-wal", directory.INDEX + "-shm"}
    assert f"`segments/{probe.CHECK}`" in PAGE
    assert f"`segments/{probe.PREFIX}*`" in PAGE
    assert re.fullmatch(r"\d{6}\.seg", file_name(7))


def test_the_worked_example_is_what_the_code_does() -> None:
    text = section("Segments")
    size = int(re.search(r"`segment_size` (\d+)", text)[1])  # type: ignore[index]
    bytes_each = int(re.search(r"K and V of (\d+) bytes", text)[1])  # type: ignore[index]
    tensors = (bytes_each,) * 4
    geometry = Geometry(tensors, group_size(tensors), (0, 1), size)
    assert f"G = {geometry.group}, `period` {geometry.period_size},\n{geometry.slots} slots" in text
    for slot, *places in rows("Segments"):
        drives, offsets = geometry.locate(np.array([int(slot)]))
        assert places == [f"drive {d} at {o}" for d, o in zip(drives[0], offsets[0], strict=True)]
    assert geometry.group * bytes_each == 262144


@pytest.mark.parametrize("cycle", [(0,), (0, 1), (0, 1, 0), (2, 0, 1, 0)])
def test_the_formula_of_the_page_is_what_the_code_does(cycle: tuple[int, ...]) -> None:
    tensors = (5000, 65536, 8192, 4096, 12288)
    geometry = Geometry(tensors, group_size(tensors), cycle, 4 << 20)
    group, count = geometry.group, len(cycle)
    stride = [-(-size // 4096) * 4096 for size in tensors]
    period = group * sum(stride)
    position = (4 << 20) // max(cycle.count(drive) for drive in cycle) // 4096 * 4096
    for slot in range(geometry.slots):
        g = slot // group
        for t in range(len(tensors)):
            p = (g + t) % count
            base = position * cycle[:p].count(cycle[p])
            before = [
                group * stride[u]
                for h in range(g % count + 1)
                for u in range(len(tensors))
                if (h + u) % count == p and (h, u) < (g % count, t)
            ]
            offset = base + g // count * period + sum(before) + slot % group * stride[t]
            drives, offsets = geometry.locate(np.array([slot]))
            assert (drives[0, t], offsets[0, t]) == (cycle[p], offset)


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    assert f"rounded up to {ALIGNMENT}" in PAGE
    assert f"≥ {GROUP_TARGET >> 10} KiB" in PAGE
    assert f"at most {eviction.HITS_MAX}." in section("Clock")
