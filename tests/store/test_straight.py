"""Reads that land where they are wanted, through the gio engine: nobody goes on while a drive may still write."""

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tests.store import kit
from tests.store.kit import close_good, eventually, keys, segment_files, soon, store_pages, value
from tutti_sglang.engine.gio import GioEngine
from tutti_sglang.gio.controller import Faults
from tutti_sglang.kernels import gio_native
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import HostRows, ObjectStore

pytestmark = pytest.mark.skipif(gio_native.compiler() is None, reason="no C++ compiler")

TENSORS = (4096, 8192, 4096, 8192)
LAYERS = (slice(0, 2), slice(2, 4))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return gio_native.current(tmp_path_factory.mktemp("gio"))


class Opened:
    """A store over gio whose pages are on the drives, and rows that no system call would take for direct I/O."""

    def __init__(self, disk: Path, native: ctypes.CDLL, tensors: tuple[int, ...] = TENSORS, pages: int = 20) -> None:
        self.settings = kit.config(disk / "a", disk / "b")
        self.tensors, self.count = tensors, pages
        self.store = self._open(native)
        self.ns = self.store.attach(kit.namespace(tensors=tensors))
        store_pages(self.store, self.ns, *range(pages), tensors=tensors)
        assert self.store.close()
        self.store = self._open(native)
        self.ns = self.store.attach(kit.namespace(tensors=tensors))
        with self.store.layers(self.ns, keys(*range(pages))):
            pass  # the engine knows the files of all segments now
        self.pages = kit.Pages(pages + 1, tensors)
        self.rows = self.pages.rows[:pages] + np.uint64(64)
        self.view = self.pages.bytes.reshape(-1)[64 : 64 + pages * sum(tensors)].reshape(pages, -1)
        self.view[:] = 0xEE

    def _open(self, native: ctypes.CDLL) -> ObjectStore:
        self.engine = GioEngine(self.settings.segment_size, 4, self.settings.max_io, native)
        return ObjectStore(self.settings, metrics=Metrics(CollectorRegistry()), engine=self.engine)

    def faults(self, faults: Faults) -> None:
        for drive in self.engine._drives.values():
            drive.backend.controller.set_faults(faults)  # type: ignore[attr-defined]

    def release(self) -> None:
        for drive in self.engine._drives.values():
            drive.backend.controller.release_dropped()  # type: ignore[attr-defined]

    def commands(self) -> int:
        return sum(drive.backend.controller.counts()["commands"] for drive in self.engine._drives.values())  # type: ignore[attr-defined]

    def good(self, *pages: int) -> bool:
        return all((self.view[page] == kit.content(page, sum(self.tensors))).all() for page in pages)

    def load(self) -> list[bool]:
        """All layers are begun before the first is waited for."""
        with self.store.layers(self.ns, keys(*range(self.count))) as layers:
            begun = [layers.begin(cut, HostRows(self.rows[:, cut]), soon(60)) for cut in LAYERS]
            for each in begun:
                layers.end(each, self.count)
            return layers.close().tolist()


@pytest.fixture
def opened(disk: Path, native: ctypes.CDLL) -> Iterator[Opened]:
    made = Opened(disk, native)
    yield made
    made.faults(Faults())
    made.release()
    made.store.close()


def test_layers_come_to_their_places_by_few_commands_and_without_staging(opened: Opened) -> None:
    before = opened.commands()
    assert opened.load() == [True] * opened.count
    assert opened.good(*range(opened.count))
    assert opened.commands() - before < opened.count, "neighbours are one command"
    assert value(opened.store, "tutti_staging_bytes", kind="high_water") == 0
    close_good(opened.store)


def test_tensors_that_are_no_whole_blocks_go_through_staging(disk: Path, native: ctypes.CDLL) -> None:
    opened = Opened(disk, native, (4096, 5000, 4096, 8192))
    opened.rows = opened.pages.rows[: opened.count]
    opened.view = opened.pages.bytes[: opened.count]
    assert opened.load() == [True] * opened.count
    assert opened.good(*range(opened.count))
    assert value(opened.store, "tutti_staging_bytes", kind="high_water") > 0
    close_good(opened.store)


def test_bytes_that_are_not_those_that_were_put_are_told(opened: Opened, disk: Path) -> None:
    for file in (file for drive in ("a", "b") for file in segment_files(disk / drive)):
        content = bytearray(file.read_bytes())
        at = content.find(kit.content(3, sum(TENSORS))[12288:16384].tobytes())
        if at >= 0:
            content[at + 77] ^= 1
            file.write_bytes(content)
    found = opened.load()
    assert found == [page != 3 for page in range(opened.count)]
    assert opened.good(*(page for page in range(opened.count) if page != 3))
    assert value(opened.store, "tutti_missed_objects", reason="checksum") == 1


def test_what_a_drive_refused_once_is_asked_for_again(opened: Opened) -> None:
    opened.faults(Faults(fail=1.0, writes=False))
    with opened.store.layers(opened.ns, keys(*range(opened.count))) as layers:
        begun = [layers.begin(cut, HostRows(opened.rows[:, cut]), soon(60)) for cut in LAYERS]
        assert all(each and each.begun and each.begun.ticket.done.wait(20) for each in begun)  # type: ignore[attr-defined]
        opened.faults(Faults())
        for each in begun:
            layers.end(each, opened.count)
        assert layers.close().all()
    assert opened.good(*range(opened.count))
    assert value(opened.store, "tutti_staging_bytes", kind="high_water") > 0, "by way of staging"


def test_nobody_goes_on_while_a_drive_may_still_write(opened: Opened) -> None:
    opened.faults(Faults(drop=1.0, writes=False))
    before, done, begun, on_their_way = opened.commands(), threading.Event(), threading.Event(), threading.Event()

    def load() -> None:
        with opened.store.layers(opened.ns, keys(*range(opened.count))) as layers:
            layers.begin(LAYERS[0], HostRows(opened.rows[:, LAYERS[0]]), soon(2))
            begun.set()
            on_their_way.wait()
            layers.close()  # what no drive knows of yet would be cancelled
            done.set()

    thread = threading.Thread(target=load)
    thread.start()
    assert begun.wait(20)
    assert eventually(lambda: opened.commands() > before)
    on_their_way.set()
    assert eventually(lambda: value(opened.store, "tutti_drive_in_service") < 2), "a drive is out of service meanwhile"
    assert not done.wait(0.5), "its deadline is long over"
    opened.faults(Faults())
    while not done.wait(0.05):
        opened.release()
    thread.join()
    assert value(opened.store, "tutti_load_overdue_seconds") > 0.3


def test_what_was_begun_and_is_not_wanted_ends_with_the_block(opened: Opened) -> None:
    opened.faults(Faults(delay=1.0, delay_seconds=0.3, writes=False))
    with opened.store.layers(opened.ns, keys(*range(opened.count))) as layers:
        for cut in LAYERS:
            layers.begin(cut, HostRows(opened.rows[:, cut]), soon(60))
    opened.view[:] = 0x11
    time.sleep(0.5)
    assert (opened.view == 0x11).all(), "no drive writes there any more"
