"""The mover whose drives write into device memory, with the CPU in the place of the device: real files and real bytes,
by what stands in for cuFile."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")
pytest.importorskip("cuda.bindings.cufile", reason="cuda-python is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import cufile
from tests.integration.linkers import (
    FULL,
    Request,
    buffers,
    content,
    fill,
    forward,
    hnd,
    keys,
    make,
    mha,
    mla,
    move_by,
    offload,
    same,
    watcher,
)
from tutti_sglang.errors import EngineError
from tutti_sglang.integration.direct import choosing, loading
from tutti_sglang.integration.direct import gds as gds_module
from tutti_sglang.integration.direct.gds import GdsMover
from tutti_sglang.integration.direct.movers import StreamMover
from tutti_sglang.integration.direct.pools import device_pools
from tutti_sglang.integration.linker import TuttiLinker
from tutti_sglang.kernels import gds
from tutti_sglang.kernels.pack import TorchPack
from tutti_sglang.store.reader import Reader

FROM, TO = [3, 9, 4, 5], [20, 11, 12, 30]
CPU = torch.device("cpu")


class World:
    """Linkers over drives that write into a device's memory, nothing read ahead. `libraries`: one of cuFile for the
    trial of each and one for its engine."""

    def __init__(self, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._disk, self._made = disk, list[TuttiLinker]()
        self.libraries = cufile.install(monkeypatch)
        move_by(monkeypatch, GdsMover)

    def open(self, pool: Any, folder: str = "store", **extra: Any) -> TuttiLinker:
        self._made.append(make(pool, self._disk / folder, **({"preload": 0} | extra)))
        return self._made[-1]

    def stored(self, pool: Any, names: list[str], pages: list[int], **extra: Any) -> TuttiLinker:
        """With these pages on the drives."""
        linker = self.open(pool, **extra)
        assert offload(linker, names, pages)
        assert linker._tier.store.drain(8)
        return linker

    def segments(self) -> list[Path]:
        return sorted((self._disk / "store" / "segments").glob("*.seg"))

    def close(self) -> None:
        for linker in self._made:
            linker.close()


@pytest.fixture
def world(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(disk, monkeypatch)
    yield made
    made.close()


def _load(linker: TuttiLinker, names: list[str], to: list[int], seen: Any = None) -> bool:
    request = Request(linker, "r", names)
    assert request.lookup() == len(names)
    assert request.load(kv=to)
    return forward(linker, seen)


@pytest.mark.parametrize("checksum", ["on", "off"])
@pytest.mark.parametrize("kind", [mha, hnd, mla])
def test_layers_come_to_their_slots_by_the_staging_and_by_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: Any, checksum: str
) -> None:
    pool = kind()
    fill(pool, 1)
    want = content(pool, FROM)
    linker = world.stored(pool, keys(4), FROM, checksum=checksum)
    fill(pool, 2)
    others = [page for page in range(64) if page not in TO]
    before, library = content(pool, others), world.libraries[-1]
    monkeypatch.setattr(Reader, "read", None)  # the way by the host: whoever takes it fails
    seen, got = watcher(pool, TO, want) if kind is mha else (None, [True] * 4)
    assert _load(linker, keys(4), TO, seen)
    assert got == [True] * 4
    assert same(content(pool, TO), want)
    assert same(content(pool, others), before)
    assert sum(size for _, _, size in library.calls) >= 4 * linker.pools["kv"].view.page_bytes  # type: ignore[index]
    assert linker._tier.store._parts.engine.name == "gds"


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_bytes_land_where_the_mover_with_pinned_memory_puts_them(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the pages, their order and the room of the staging."""
    count = data.draw(st.integers(1, 20), "pages")
    places = data.draw(st.permutations(range(1, 64)).map(lambda each: each[: 2 * count]), "places")
    page_layers, lanes = data.draw(st.sampled_from([(1, 1), (2, 2), (8, 4), (256, 4)]), "staging")
    kind = data.draw(st.sampled_from([mha, hnd, mla]), "pool")
    disk, loaded = tmp_path_factory.mktemp("pages"), []
    for mover in (GdsMover, StreamMover):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gds_module, "PAGE_LAYERS", page_layers)
            patch.setattr(gds_module, "LANES", lanes)
            patch.setattr(gds_module, "ALIGNMENT", 4096)
            world = World(disk, patch)
            move_by(patch, mover)
            pool = kind()
            fill(pool, 1)
            ahead = 0 if mover is GdsMover else "8MiB"
            linker = world.stored(pool, keys(count), places[:count], folder=mover.__name__, preload=ahead)
            fill(pool, 2)
            if ahead:
                Request(linker, "r", keys(count)).arrive()
                while linker.held(["r"]):
                    time.sleep(0.01)
            assert _load(linker, keys(count), places[count:])
            loaded.append([buffer.clone() for buffer in buffers(pool)])
            world.close()
    assert same(*loaded)


def test_pieces_of_many_pages_and_requests_share_a_small_staging(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds_module, "PAGE_LAYERS", 4)
    monkeypatch.setattr(gds_module, "LANES", 2)
    pool = mha()
    fill(pool, 1)
    want = content(pool, [*range(1, 26)])
    linker = world.stored(pool, keys(25), [*range(1, 26)])
    fill(pool, 2)
    one, two = Request(linker, "one", keys(25)), Request(linker, "two", keys(11))
    assert (one.lookup(), two.lookup()) == (25, 11)
    assert one.load(kv=[*range(38, 63)])
    assert two.load(kv=[*range(26, 37)])
    assert forward(linker)
    assert same(content(pool, [*range(38, 63)]), want)
    assert same(content(pool, [*range(26, 37)]), [each[:11] for each in want])


def test_pages_that_are_not_on_a_drive_yet_are_copied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha()
    fill(pool, 1)
    want = content(pool, FROM)
    linker = world.open(pool)
    parts = linker._tier.store._parts
    monkeypatch.setattr(parts.accepted, "take", lambda nbytes: time.sleep(0.01) or [])
    assert offload(linker, keys(4), FROM)
    assert len(parts.accepted) == 4
    fill(pool, 2)
    assert _load(linker, keys(4), TO)
    assert same(content(pool, TO), want)
    assert world.libraries[-1].calls == []
    monkeypatch.undo()


def test_spoiled_bytes_are_a_failed_load(world: World) -> None:
    pool = mha()
    fill(pool, 1)
    linker = world.stored(pool, keys(4), FROM)
    for file in world.segments():
        content_ = bytearray(file.read_bytes())
        content_[7] ^= 1
        file.write_bytes(content_)
    before = linker._metrics.value("tutti_missed_objects", reason="checksum")
    assert not _load(linker, keys(4), TO), "SGLang aborts the requests of the batch"
    assert linker._metrics.value("tutti_missed_objects", reason="checksum") == before + 1


def test_what_cufile_refuses_comes_by_way_of_the_host(world: World) -> None:
    """And neither the drive nor the way its files are opened is blamed for it."""
    pool = mha()
    fill(pool, 1)
    want, linker = content(pool, FROM), world.stored(pool, keys(4), FROM)
    fill(pool, 2)
    world.libraries[-1].refuses = 5022  # cuFile's invalid value: EINVAL
    drives = linker._tier.store._parts.drives.values()
    direct = [drive.direct for drive in drives]
    assert _load(linker, keys(4), TO)
    world.libraries[-1].refuses = 0
    assert same(content(pool, TO), want)
    assert [drive.direct for drive in drives] == direct
    assert all(drive.serves for drive in drives)


def test_finish_does_not_return_while_a_drive_may_write_to_the_staging(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LAYER_SECONDS", 0.2)
    pool = mha()
    fill(pool, 1)
    linker, library = world.stored(pool, keys(4), FROM), world.libraries[-1]
    answer, move = threading.Event(), library._move
    monkeypatch.setattr(library, "_move", lambda *each: (answer.wait(60), move(*each))[1])
    done = threading.Event()
    thread = threading.Thread(target=lambda: (_load(linker, keys(4), TO), done.set()))
    thread.start()
    assert not done.wait(1.5), "its deadline is over, the drive's answer is not there"
    answer.set()
    thread.join(30)
    assert done.is_set()
    calls = len(library.calls)
    fill(pool, 5)
    before = content(pool, TO)
    time.sleep(0.3)
    assert len(library.calls) == calls
    assert same(content(pool, TO), before)


def test_the_staging_is_bounded_and_given_back(world: World) -> None:
    pool = mha(pages=200)
    linker = world.open(pool)
    (part,) = device_pools(pool, FULL).values()
    ((address, size),) = linker._mover.memory
    page_layer = sum(part.view.maps[0].sizes[part.layers[0]])
    assert size <= gds_module.PAGE_LAYERS * page_layer + gds_module.LANES * gds_module.ALIGNMENT
    library = world.libraries[-1]
    assert library.memory == {address: size}
    linker.close()
    assert not library.memory
    assert not library.open


@pytest.mark.parametrize("mode", [gds.Mode.COMPAT, gds.Mode.NONE, gds.Mode.P2PDMA, gds.Mode.NVIDIA_FS])
@pytest.mark.parametrize("engine", ["auto", "gds", "uring"])
def test_it_is_chosen_where_it_pays_or_is_asked_for(monkeypatch: pytest.MonkeyPatch, engine: str, mode: Any) -> None:
    cufile.install(monkeypatch)
    monkeypatch.setattr(gds, "probe", lambda: gds.Found(mode, "a reason" * (mode in (gds.Mode.COMPAT, gds.Mode.NONE))))
    pools = [*device_pools(mha(), FULL).values()]
    mover = choosing.of_device(pools, CPU, engine)
    pays = mode in (gds.Mode.P2PDMA, gds.Mode.NVIDIA_FS)
    assert isinstance(mover, GdsMover) == (engine == "gds" or (engine == "auto" and pays))
    if isinstance(mover, GdsMover):
        assert (mover.engine, str(mode) in mover.name) == ("gds", True)
    else:
        assert (mover.engine, mover.fetches) == ("", False)
        assert ("a reason" if engine == "auto" else "engine = uring") in mover.name


def test_a_device_that_makes_other_sums_is_found_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    cufile.install(monkeypatch)
    monkeypatch.setattr(gds, "probe", lambda: gds.Found(gds.Mode.NVIDIA_FS, ""))
    monkeypatch.setattr(TorchPack, "_sum", lambda pack, data: torch.zeros(-(-len(data) // 4096), dtype=torch.int64))
    mover = choosing.of_device([*device_pools(mha(), FULL).values()], CPU, "auto")
    assert not isinstance(mover, GdsMover)
    assert "other sums" in mover.name


def test_where_its_trial_fails_pinned_memory_is_used_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(library: Any, address: int, size: int, flags: int) -> None:
        raise cufile.Refused(5023)

    cufile.install(monkeypatch)
    monkeypatch.setattr(cufile.Library, "buf_register", refuse)
    monkeypatch.setattr(gds, "probe", lambda: gds.Found(gds.Mode.NVIDIA_FS, ""))
    pools = [*device_pools(mha(), FULL).values()]
    mover = choosing.of_device(pools, CPU, "auto")
    assert not isinstance(mover, GdsMover)
    assert "5023" in mover.name
    with pytest.raises(EngineError, match="5023"):
        choosing.of_device(pools, CPU, "gds")
