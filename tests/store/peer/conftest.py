"""A fleet of files, whose every fault can be had at will, and the real one."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.conftest import disk
from tests.store.peer.fleet_kit import Fleet, fleet_of
from tutti_sglang.config import PeerConfig
from tutti_sglang.store.peer import link

__all__ = ["disk"]

MIB = 1 << 20


class Files:
    """A fleet of files. `mood`: what its engines do from now on (see `engine`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.mood("well")

    def mood(self, name: str) -> None:
        """Change it, all or nothing."""
        (self.folder / "new").write_text(json.dumps(name))
        (self.folder / "new").rename(self.folder / "mood")

    def peer(self, **changes: object) -> PeerConfig:
        """Settings of a store that is part of it."""
        settings = {"kind": "mooncake", "master": str(self.folder), "publish": "all", "memory": 4 * MIB, "timeout": 1.0}
        return PeerConfig(**(settings | changes))  # type: ignore[arg-type]

    @property
    def objects(self) -> list[Path]:
        """What the fleet has."""
        return [path for path in self.folder.iterdir() if "-" in path.name]


@pytest.fixture
def files(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """A fleet of files, and workers that belong to it."""
    pytest.importorskip("mooncake", reason="pip install mooncake-transfer-engine-non-cuda")
    monkeypatch.setattr(link, "WORKER", [sys.executable, str(Path(__file__).parent / "engine.py")])
    return Files(disk / "files")


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A real master and the memory of one client, for all tests of a file."""
    with fleet_of(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """A real fleet of its own, to be killed."""
    with fleet_of(tmp_path / "fleet") as fleet:
        yield lambda: fleet
