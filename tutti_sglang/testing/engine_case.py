"""What every part of the engine suite starts from: an engine of the kind under test, on files and memory of its own."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import Batch, IoClass, Results
from tutti_sglang.memory import Region
from tutti_sglang.testing.faults import FaultPlan
from tutti_sglang.testing.rig import BLOCK, Rig

PATIENCE = 60.0
"""Seconds that something which must happen may take on a busy machine; nothing is asserted on time."""

Start = Callable[..., Engine]


class EngineCase:
    """Subclasses say how an engine is made."""

    def create(self, memory: Region, *, depth: int, max_io: int, plan: FaultPlan | None = None) -> Engine:
        """An engine for segments of SEGMENT bytes, with at most `depth` transfers in flight per drive and, where there
        is a plan, its faults. `memory` is where most of the I/O goes: an engine may register it."""
        raise NotImplementedError

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        """Two drives of two segments."""
        rig = Rig(tmp_path)
        yield rig
        rig.close()

    @pytest.fixture
    def start(self, rig: Rig) -> Iterator[Start]:
        """Makes engines with the rig's files attached; opens their gates and closes them afterwards."""
        made: list[tuple[Engine, FaultPlan | None]] = []

        def start(*, depth: int = 4, max_io: int = 256 << 10, plan: FaultPlan | None = None) -> Engine:
            engine = self.create(rig.region, depth=depth, max_io=max_io, plan=plan)
            made.append((engine, plan))
            rig.attach(engine)
            return engine

        yield start
        for engine, plan in made:
            if plan:
                plan.gate.open()
            assert engine.close(PATIENCE)


def later() -> float:
    """A deadline that does not matter."""
    return time.monotonic() + PATIENCE


def run(engine: Engine, batch: Batch, klass: IoClass = IoClass.DEMAND) -> Results:
    """Submit and wait for the end."""
    return engine.wait(engine.submit(batch, klass, later()), PATIENCE)


def settle_behind(engine: Engine, rig: Rig, offset: int) -> None:
    """Return once everything that was submitted before has been looked at: a healthy block at `offset` of drive 0,
    queued behind it, has been read."""
    place = rig.memory.size - BLOCK
    assert run(engine, rig.batch([offset], places=[place])).tolist() == [BLOCK]
