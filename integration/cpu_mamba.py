"""Mamba2's state updates where the device is the CPU, in PyTorch: SGLang has them in Triton and CUDA only.

Token by token in float32, so that a prompt computed at once, in chunks, or after a restored state takes the same steps.
Shapes are those of SGLang's kernels (kernels/ops/mamba): T tokens of all sequences in a row, H heads of P values, N
states, G groups of heads; a pool's first dimension is the slot.
"""
# ruff: noqa: PLR0913  the signatures are SGLang's

import importlib
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import conv1d, silu, softplus

_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_KERNELS = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"


def install() -> None:
    """Give SGLang's Mamba2 layers these functions; before its attention backends are imported. Idempotent."""
    mixer, kernels = importlib.import_module(_MIXER), importlib.import_module(_KERNELS)
    for name, function in _MIXER_FUNCTIONS.items():
        setattr(mixer, name, function)
    setattr(kernels, track_mamba_states_if_needed.__name__, track_mamba_states_if_needed)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    conv_states: torch.Tensor,
    activation: str | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """Depthwise convolution of x (channels, T), each sequence on its own; its last inputs go to its slot's state."""
    out = torch.empty_like(x)
    for sequence, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        slot = cache_indices[sequence]
        if start == end or slot < 0:
            continue
        before = conv_states[slot] if has_initial_state[sequence] else torch.zeros_like(conv_states[slot])
        window = torch.cat([before.to(x.dtype), x[:, start:end]], dim=1)
        out[:, start:end] = conv1d(window[None], weight[:, None], bias, groups=len(weight))[0]
        conv_states[slot] = window[:, -before.shape[1] :].to(conv_states.dtype)
    return silu(out) if activation else out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The next token of each sequence: x (sequences, channels)."""
    slots = conv_state_indices.long()
    window = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_state[slots] = window[:, :, 1:].to(conv_state.dtype)
    out = (window * weight).sum(-1)
    if bias is not None:
        out = out + bias
    return silu(out) if activation else out


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    track_end_locs: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The scan of x (1, T, H, P) into `out`; A and D (H), dt (1, T, H), B and C (1, T, G, N).

    Returns the states (H, P, N) before each token that begins a chunk of the row, after each sequence, and before each
    token of `track_end_locs`.
    """
    heads, width = x.shape[2:]
    dt = softplus(dt[0].float() + dt_bias.float())
    decay, inputs = torch.exp(dt * A.float()), dt[..., None] * x[0].float()
    B, C = (t[0].float().repeat_interleave(heads // t.shape[2], dim=1) for t in (B, C))
    tracked = [] if track_end_locs is None else track_end_locs.tolist()
    wanted = {*range(0, x.shape[1], chunk_size), *tracked}
    before: dict[int, torch.Tensor] = {}
    last = []
    for sequence, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = x.new_zeros((heads, width, B.shape[-1]), dtype=torch.float32)
        if initial_states is not None:
            state = initial_states[sequence].float()
        for t in range(start, end):
            if t in wanted:
                before[t] = state
            state = state * decay[t][:, None, None] + inputs[t][:, :, None] * B[t][:, None, :]
            out[0, t] = (state * C[t][:, None, :]).sum(-1) + D[:, None] * x[0, t]
        last.append(state)
    dtype = state_dtype or C.dtype
    chunks = torch.stack([before[t] for t in range(0, x.shape[1], chunk_size)]).to(dtype)
    ends = torch.stack([before[t] for t in tracked]).to(dtype)[None] if tracked else None
    return chunks[None], torch.stack(last).to(dtype), ends


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """The next token of each sequence: x and dt (sequences, H, P), A (H, P, N), B and C (sequences, G, N)."""
    slots = state_batch_indices.long()
    dt = softplus(dt.float() + dt_bias.float())
    B, C = (t.float().repeat_interleave(x.shape[1] // t.shape[1], dim=1)[:, :, None] for t in (B, C))
    new = state[slots].float() * torch.exp(dt[..., None] * A) + (dt * x.float())[..., None] * B
    state[slots] = new.to(state.dtype)
    out.copy_((new * C).sum(-1) + D * x)


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Keep a copy of the state of each sequence under the mask in the slot named for it."""
    source, target = cache_indices[mamba_track_mask].long(), mamba_track_indices[mamba_track_mask].long()
    for states in (conv_states, ssm_states):
        states[target] = states[source]


_MIXER_FUNCTIONS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_fn_triton": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "causal_conv1d_update_triton": causal_conv1d_update,
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "selective_state_update": selective_state_update,
}
