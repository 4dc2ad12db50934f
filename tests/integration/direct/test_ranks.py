"""The linker on two ranks with a real gloo group: they start together or not at all."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.gloo import Rank, on_ranks
from tests.integration.linkers import fill, make, mha
from tutti_sglang.errors import RankError
from tutti_sglang.integration.cpu_model import built_in_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _scheduler() -> None:
    """Once: this import takes half a minute on a small machine, and the ranks fork from here."""
    importlib.import_module("sglang.srt.managers.scheduler")


def _linker(disk: Path, **extra: Any) -> Any:
    pool = mha()
    fill(pool, 1 + torch.distributed.get_rank())
    return make(pool, disk / "store", group=torch.distributed.new_group(backend="gloo"), **extra), pool


def test_ranks_that_mean_other_models_do_not_start(disk: Path) -> None:
    def other_models(rank: Rank) -> str:
        with pytest.raises(RankError) as caught:
            _linker(disk, model_id=f"model {rank.number}")
        return str(caught.value)

    (said,) = on_ranks(built_in_model(), 2, other_models, tp_size=2)
    assert said[0] == said[1]
    assert "Rank 1 has another" in said[0]
