"""PyTorch's attention on the CPU, for models with a sliding window and for attention data parallelism too.

SGLang's writes the KV of a window to places in the window's own pool, and then reads that pool at places of the other
pool (layers/attention/torch_native_backend.py:150, :243): what a layer sees there is other tokens' KV, or nothing. And
it does not say what length a request has that only pads a batch (layers/attention/base_attn_backend.py:286), which is
asked where ranks must have equally many tokens.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


def install() -> None:
    """Take the place of SGLang's. Idempotent."""
    register_attention_backend("torch_native")(WindowedAttention)


class WindowedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's, which reads each layer where it was written."""

    def _run_sdpa_forward_extend(self, query: Any, output: Any, k: Any, v: Any, *where: Any, **how: Any) -> Any:
        return super()._run_sdpa_forward_extend(query, output, k, v, *self._places(*where, window=_window(how)), **how)

    def _run_sdpa_forward_decode(self, query: Any, output: Any, k: Any, v: Any, *where: Any, **how: Any) -> Any:
        return super()._run_sdpa_forward_decode(query, output, k, v, *self._places(*where, window=_window(how)), **how)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Tokens of a request that only pads a batch: one, which lies in the page that nobody uses."""
        return 1

    def _places(
        self, table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, *more: Any, window: bool
    ) -> tuple[Any, ...]:
        """`table` (requests, tokens): the place of each token; its `rows` are those of the batch, `lengths` of each."""
        if window and self.use_sliding_window_kv_pool:
            table = self.token_to_kv_pool.translate_loc_from_full_to_swa(table[rows, : int(lengths.max())])
            rows = torch.arange(len(rows))
        return table, rows, lengths, *more


def _window(how: dict[str, Any]) -> bool:
    return how["sliding_window_size"] is not None
