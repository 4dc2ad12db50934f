"""The code of the stream mover, on the CPU: by the twin, and by Triton's kernel where it is interpreted."""

import numpy as np
import pytest
import torch

from tests.kernels import streams_suite as suite
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import streams
from tutti_sglang.kernels.pack import Pack, TorchPack

CPU = torch.device("cpu")


def test_layers_come_one_by_one() -> None:
    suite.check_layers_come_one_by_one(suite.World(CPU))


def test_pages_come_back_whole() -> None:
    suite.check_pages_come_back_whole(suite.World(CPU))


def test_pieces_land_with_their_sums() -> None:
    suite.check_pieces_land_with_their_sums(suite.World(CPU))


def test_the_probe_passes_where_bytes_come_back() -> None:
    suite.check_the_probe_finds_what_does_not_work(suite.World(CPU))


class _Spoils(TorchPack):
    """Loses what it should move to the pool."""

    def _fill(self, sums: torch.Tensor, *rest: object, to_pool: bool) -> None:
        if not to_pool:
            super()._fill(sums, *rest, to_pool=to_pool)  # type: ignore[arg-type]


def test_the_probe_fails_by_name_where_other_bytes_come_back() -> None:
    world = suite.World(CPU, _Spoils)
    with pytest.raises(EngineError, match="came back as others"):
        streams.check(world.stream, world.pack, world.rows[:2], np.full(suite.TENSORS, suite.SIZE))


def test_without_sums_no_memory_is_taken_for_them() -> None:
    world = suite.World(CPU)
    pack: Pack = world.pack
    dense = torch.from_numpy(world.rows[:2].view(np.int64))
    assert pack.gather(torch.tensor([1, 2]), dense, sums=False).numel() == 0
    assert pack.gather(torch.tensor([1, 2]), dense[:, 2:4], 2).shape == (2, 2, 1)
