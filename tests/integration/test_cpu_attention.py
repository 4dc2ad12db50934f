"""Attention over a sliding window on the CPU: each layer sees the tokens of its own pool, however they came there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.layers.radix_attention import AttentionType

from tests.integration.linkers import HEADS, PAGE, WIDTH, swa

WINDOW = 5
FULL_LAYER, WINDOW_LAYER = 0, 1
TOKENS = 3 * PAGE


class Model:
    """One sequence of `TOKENS` tokens over pools in which a token of the window lies elsewhere than in the other."""

    def __init__(self) -> None:
        from tutti_sglang.integration.cpu_attention import WindowedAttention

        self.pool = swa()
        mapping = torch.zeros(self.pool.size + PAGE, dtype=torch.int64)
        self.places = torch.arange(PAGE, PAGE + TOKENS)
        mapping[self.places] = self.places.flip(0)
        self.pool.register_mapping(mapping)
        table = torch.zeros(4, 2 * TOKENS, dtype=torch.int32)
        table[2, :TOKENS] = self.places
        tables = SimpleNamespace(req_to_token=table)
        self.attention = WindowedAttention(
            SimpleNamespace(device="cpu", req_to_token_pool=tables, token_to_kv_pool=self.pool)
        )
        shape = (TOKENS, HEADS, WIDTH)
        self.q, self.k, self.v = (torch.randn(shape, dtype=torch.float16) for _ in range(3))

    def run(self, layer: int, start: int, end: int, *, decode: bool = False) -> torch.Tensor:
        """The tokens from `start` on, after those before were run."""
        batch = SimpleNamespace(
            out_cache_loc=self.places[start:end],
            req_pool_indices=torch.tensor([2]),
            seq_lens=torch.tensor([end]),
            extend_prefix_lens=torch.tensor([start]),
            extend_seq_lens=torch.tensor([end - start]),
            encoder_lens=None,
        )
        its_window = WINDOW if layer == WINDOW_LAYER else -1
        kind = {"is_cross_attention": False, "attn_type": AttentionType.DECODER, "sliding_window_size": its_window}
        shape: dict[str, Any] = {"tp_q_head_num": HEADS, "tp_k_head_num": HEADS, "scaling": WIDTH**-0.5}
        shape |= {"qk_head_dim": WIDTH, "v_head_dim": WIDTH, "layer_id": layer, "k_scale": None, "v_scale": None}
        self.attention.init_forward_metadata(batch)
        run = self.attention.forward_decode if decode else self.attention.forward_extend
        q, k, v = (each[start:end] for each in (self.q, self.k, self.v))
        return run(q, k, v, SimpleNamespace(**kind, **shape), batch).view(-1, HEADS, WIDTH)

    def expected(self, layer: int) -> torch.Tensor:
        """By the formula."""
        q, k, v = (each.float().movedim(0, 1) for each in (self.q, self.k, self.v))
        back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        seen = (back >= 0) & (back <= (WINDOW if layer == WINDOW_LAYER else TOKENS))
        weights = (q @ k.movedim(1, 2) * WIDTH**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v).movedim(0, 1)


@pytest.mark.parametrize("layer", [FULL_LAYER, WINDOW_LAYER], ids=["full", "window"])
def test_a_sequence_in_chunks_and_token_by_token_sees_its_own_tokens(layer: int) -> None:
    torch.manual_seed(1)
    model = Model()
    middle = TOKENS - 4
    parts = [model.run(layer, 0, 20), model.run(layer, 20, middle)]
    parts += [model.run(layer, token, token + 1, decode=True) for token in range(middle, TOKENS)]
    torch.testing.assert_close(torch.cat(parts).float(), model.expected(layer), rtol=2e-3, atol=2e-3)
