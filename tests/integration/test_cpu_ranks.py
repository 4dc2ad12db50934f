"""Ranks of attention data parallelism on the CPU get each other's tokens, by SGLang's own ways."""

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.gloo import Rank, on_ranks
from tutti_sglang.integration.cpu_model import built_in_model

WIDTH = 3
OWN = {0: 4, 1: 2}
"""Tokens of each rank."""


@pytest.fixture(scope="module")
def model() -> Path:
    importlib.import_module("sglang.srt.managers.scheduler")  # the ranks fork from here
    return built_in_model()


def _tokens(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH) + 100 * rank


def _gather_and_scatter(rank: Rank) -> list[bool]:
    """Of tokens padded to equal counts and of others; whether each rank saw all, and got its own back."""
    from sglang.srt.layers.dp_attention import DpPaddingMode, dp_gather_replicate, dp_reduce_scatter_tensor, dp_scatter
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from tutti_sglang.integration import cpu_ranks

    cpu_ranks.install()
    right = []
    for mode, counts in ((DpPaddingMode.MAX_LEN, [4, 4]), (DpPaddingMode.SUM_LEN, list(OWN.values()))):
        batch = ForwardBatch.__new__(ForwardBatch)
        batch.dp_padding_mode, batch.dp_local_start_pos, batch.dp_local_num_tokens = mode, None, None
        batch.global_num_tokens_cpu, batch.global_num_tokens_gpu = counts, torch.tensor(counts)
        mine = _tokens(rank.number, counts[rank.number])
        everybodys = torch.full((sum(counts), WIDTH), -1.0)
        dp_gather_replicate(everybodys, mine.clone(), batch)
        right.append(torch.equal(everybodys, torch.cat([_tokens(each, counts[each]) for each in OWN])))
        back = torch.full_like(mine, -1.0)
        dp_scatter(back, everybodys, batch)
        right.append(torch.equal(back, mine))
    total = torch.full((4, WIDTH), -1.0)
    dp_reduce_scatter_tensor(total, torch.cat([_tokens(each, 4) for each in OWN]))
    right.append(torch.equal(total, 2 * _tokens(rank.number, 4)))
    return right


def test_each_rank_sees_all_tokens_and_gets_its_own_back(model: Path) -> None:
    (answers,) = on_ranks(model, 2, _gather_and_scatter, tp_size=2, dp_size=2, enable_dp_attention=True)
    assert answers == [[True] * 5] * 2
