"""Rigs whose mover is a CPU twin of two threads."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tutti_sglang.gio.queues import HostMemory
from tutti_sglang.gio.twin import Bell, Pace, Twin
from tutti_sglang.testing.gio_rig import SHAPES, GioRig, Shape

Start = Callable[..., GioRig]


@contextmanager
def rigs(native: ctypes.CDLL, tmp_path: Path) -> Iterator[Start]:
    """Makes them; at the end no answer may have been one that nobody waited for."""
    made: list[tuple[GioRig, Twin, Bell]] = []

    def start(shape: Shape = SHAPES["SGL"]) -> GioRig:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        rig = GioRig(folder, native, HostMemory(), shape)
        bell = Bell(native)
        made.append((rig, Twin(native, rig.ring, [rig.controller], bell, Pace(workers=2)), bell))
        return rig

    yield start
    for rig, twin, bell in made:
        states = rig.pairs.states()
        rig.close()
        assert twin.close(60)
        bell.close()
        assert rig.controller.handle is None
        assert not states["stray"].any()
