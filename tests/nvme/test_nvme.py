"""The VFIO controller against NVMe drives that nobody here wrote: QEMU's, in a guest with an IOMMU. Each test is a
check that ran in the guest (checks_*.py there)."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nvme import bench, checks_drive, checks_mover, checks_pci, checks_store, machine
from tests.store import kit
from tutti_sglang.geometry import Geometry
from tutti_sglang.gio.vfio import extent
from tutti_sglang.store import superblock
from tutti_sglang.store.index import Index
from tutti_sglang.store.slots import NO_SLOT, numbers_of, segments_of

pytestmark = pytest.mark.timeout(machine.TIMEOUT + 100)

CHECKS = [name for module in (checks_pci, checks_drive, checks_mover, checks_store) for name, _ in bench.checks(module)]


@pytest.mark.parametrize("name", CHECKS)
def test_in_the_guest(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    assert name in outcomes, "the guest did not come to it"
    assert not outcomes[name]["detail"], outcomes[name]["detail"]


def test_every_page_lies_on_the_drive_when_the_guest_is_gone(outcomes: dict[str, dict[str, Any]], folder: Path) -> None:
    assert not outcomes[checks_store.check_the_last_pages_are_there_when_the_guest_ends.__name__]["detail"]
    image = (folder / "wide.img").read_bytes()
    block = superblock.parse(image[:4096].rstrip(b"\0"), "the image")
    assert (block.drive, block.segment_size) == (0, kit.MIB)
    index = Index(folder / "index" / "index.db")
    assert index.meta("store") == block.store
    rows = {row.id: row for row in index.segments()}
    numbers = checks_store.NUMBERS
    found = [index.lookup(number, kit.keys(*numbers)).records["slot"] for number in index.namespaces()]
    (slots,) = [each.astype(np.int64) for each in found if (each != NO_SLOT).all()]
    sizes = np.cumsum([0, *kit.TENSORS])
    starts = set()
    for number, slot in zip(numbers, slots, strict=True):
        row = rows[int(segments_of(slot))]
        with open(folder / "index/raw/WIDE-1/segments" / f"{row.id:06d}.seg", "rb") as file:
            start = extent.read(file.fileno())
        starts.add(start)
        geometry = Geometry(kit.TENSORS, row.group, row.cycle, kit.MIB, row.stripe)
        _, offsets = geometry.locate(np.array([numbers_of(slot)]))
        page = kit.content(number, sum(kit.TENSORS))
        for tensor, offset in enumerate(offsets[0].tolist()):
            there = image[start + offset : start + offset + kit.TENSORS[tensor]]
            assert there == page[sizes[tensor] : sizes[tensor + 1]].tobytes(), (number, tensor)
    index.close()
    assert len(starts) > 1
    assert all(start >= kit.MIB and start % kit.MIB == 0 for start in starts)


def test_the_refused_drive_is_as_it_was(outcomes: dict[str, dict[str, Any]], folder: Path) -> None:
    assert outcomes
    assert (folder / "guard.img").read_bytes() == (folder / "guard.before").read_bytes()
    subprocess.run(["/sbin/e2fsck", "-f", "-n", folder / "guard.img"], check=True, capture_output=True)
