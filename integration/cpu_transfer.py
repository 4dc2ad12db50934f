"""SGLang's copies between device and host pools, where the device is the CPU: `sgl_kernel.kvcacheio` in NumPy.

SGLang imports these operations only where there is a GPU; its pools call them by these names. Each comes down to rows
of bytes, moved in one statement per layer. Layouts (pool_host/mha.py, pool_host/mla.py): rows of the device and of
layer_first are tokens; page_first is (token, layer); page_first_direct is (page, layer, token); page_head is (page,
head, token, layer).
"""
# ruff: noqa: PLR0913  the signatures are SGLang's

import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

_POOL_MODULES = tuple(f"sglang.srt.mem_cache.pool_host.{kind}" for kind in ("mha", "mla", "mamba"))


def install() -> None:
    """Make host pools work on the CPU: unpinned memory, these copies, a stream that can be waited for. Idempotent.

    Only what SGLang and torch leave undefined without a GPU is set. Two values are replaced: the wish for pinned
    memory, wherever SGLang asks torch for it, and the 10 GiB that SGLang keeps free on a GPU host, which a small
    machine does not have.
    """
    from sglang.srt.mem_cache.pool_host import base

    # Every pool stores its constructor's `pin_memory=True` here; pinning calls the CUDA runtime.
    base.HostKVCache.pin_memory = property(lambda self: False, lambda self, value: None)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = min(base.HICACHE_HOST_MEMORY_RESERVE_BYTES, _memory() // 8)
    _leave_unpinned()
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None
    for name in _POOL_MODULES:
        module = importlib.import_module(name)
        for operation in OPERATIONS:
            if not hasattr(module, operation.__name__):
                setattr(module, operation.__name__, operation)


def _leave_unpinned() -> None:
    # A decode step of a recurrent model asks for it (managers/schedule_batch.py:3830), and a layer with LoRA
    # (lora/layers.py:475); a CUDA build of torch then looks for a driver.
    torch.Tensor.pin_memory = lambda self, *_: self
    for name in ("arange", "empty", "tensor", "zeros"):
        make = getattr(torch, name)
        if not hasattr(make, "__wrapped__"):
            setattr(torch, name, _unpinned(make))


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return unpinned


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Rows(NamedTuple):
    """Rows of bytes in memory: row i lies at `address + i * stride`; `numbers` (int64) picks some."""

    address: int
    stride: int
    numbers: Any

    def view(self, width: int) -> Any:
        """Array of `width`-byte items over the rows from 0 to the last one picked."""
        count = int(self.numbers.max()) + 1
        memory: Any = (ctypes.c_char * ((count - 1) * self.stride + width)).from_address(self.address)
        return np.ndarray((count,), f"V{width}", memory, 0, (self.stride,))


def _copy(source: _Rows, target: _Rows, width: int) -> None:
    if len(source.numbers):
        target.view(width)[target.numbers] = source.view(width)[source.numbers]


def _page_rows(
    tensor: torch.Tensor, indices: torch.Tensor, page_size: int, layer: int | None = None
) -> tuple[_Rows, int]:
    """Pages of a device or layer_first tensor or, with `layer`, its part of a page_first_direct one's; their width."""
    assert tensor.is_contiguous()
    pages = indices.numpy()[::page_size] // page_size
    if layer is None:
        width = tensor[0].nbytes * page_size
    else:
        width = tensor[0, 0].nbytes
        pages = pages * tensor.shape[1] + layer
    return _Rows(tensor.data_ptr(), width, pages), width


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Tokens to tokens, tensor by tensor."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        rows, width = _page_rows(source, src_indices, page_size)
        _copy(rows, _page_rows(target, dst_indices, page_size)[0], width)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers (of K, then of V) into page_first_direct tensors (K, V)."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        rows, width = _page_rows(source, src_indices, page_size)
        target = dst_ptrs[number // layers]
        _copy(rows, _page_rows(target, dst_indices, page_size, number % layers)[0], width)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer out of page_first_direct tensors (K, V)."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        rows, width = _page_rows(source, src_indices, page_size, layer_id)
        _copy(rows, _page_rows(target, dst_indices, page_size)[0], width)


def transfer_kv_per_layer_mla(
    src: torch.Tensor, dst: torch.Tensor, src_indices: torch.Tensor, dst_indices: torch.Tensor, item_size: int
) -> None:
    """One layer, tokens to tokens."""
    source = _Rows(src.data_ptr(), item_size, src_indices.numpy())
    _copy(source, _Rows(dst.data_ptr(), item_size, dst_indices.numpy()), item_size)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """All layers, tokens to tokens; `src_layers` and `dst_layers` are tables of addresses (uint64)."""
    for source, target in zip(src_layers.tolist()[:num_layers], dst_layers.tolist()[:num_layers], strict=True):
        rows = _Rows(source, item_size, src_indices.numpy())
        _copy(rows, _Rows(target, item_size, dst_indices.numpy()), item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """One layer out of a page_first tensor; `src_layout_dim` is the bytes of a token in all layers."""
    source = _Rows(src.data_ptr() + layer_id * item_size, src_layout_dim, src_indices.numpy())
    _copy(source, _Rows(dst.data_ptr(), item_size, dst_indices.numpy()), item_size)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers into a page_first tensor."""
    for layer, source in enumerate(src_layers.tolist()[:num_layers]):
        target = _Rows(dst.data_ptr() + layer * item_size, dst_layout_dim, dst_indices.numpy())
        _copy(_Rows(source, item_size, src_indices.numpy()), target, item_size)


def transfer_kv_mamba_pf_lf(**arguments: Any) -> None:
    """`transfer_kv_per_layer_mla_pf_lf` for states."""
    transfer_kv_per_layer_mla_pf_lf(**arguments)


def transfer_kv_mamba_lf_pf(*, src_ptrs: Any, **arguments: Any) -> None:
    """`transfer_kv_all_layer_mla_lf_pf` for states."""
    transfer_kv_all_layer_mla_lf_pf(src_ptrs, **arguments)


def transfer_kv_per_layer(*, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, **common: Any) -> None:
    """`transfer_kv_per_layer_mla` for K and V."""
    transfer_kv_per_layer_mla(src_k, dst_k, **common)
    transfer_kv_per_layer_mla(src_v, dst_v, **common)


def transfer_kv_all_layer(
    *, src_k_layers: Any, dst_k_layers: Any, src_v_layers: Any, dst_v_layers: Any, **common: Any
) -> None:
    """`transfer_kv_all_layer_mla` for K and V."""
    transfer_kv_all_layer_mla(src_k_layers, dst_k_layers, **common)
    transfer_kv_all_layer_mla(src_v_layers, dst_v_layers, **common)


def transfer_kv_per_layer_pf_lf(*, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, **common: Any) -> None:
    """`transfer_kv_per_layer_mla_pf_lf` for K and V."""
    transfer_kv_per_layer_mla_pf_lf(src_k, dst_k, **common)
    transfer_kv_per_layer_mla_pf_lf(src_v, dst_v, **common)


def transfer_kv_all_layer_lf_pf(*, src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, **common: Any) -> None:
    """`transfer_kv_all_layer_mla_lf_pf` for K and V."""
    transfer_kv_all_layer_mla_lf_pf(src_k_layers, dst_k, **common)
    transfer_kv_all_layer_mla_lf_pf(src_v_layers, dst_v, **common)


def transfer_kv_per_layer_ph_lf(
    *,
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    """One layer out of page_head tensors K and V."""
    width = item_size // head_num
    numbers, heads = _head_rows(src_indices, page_size, head_num), _head_rows(dst_indices, 1, head_num)
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        rows = _Rows(source.data_ptr() + layer_id * width, src_layout_dim // head_num, numbers)
        _copy(rows, _Rows(target.data_ptr(), width, heads), width)


def transfer_kv_all_layer_lf_ph(
    *,
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    """All layers into page_head tensors K and V."""
    width = item_size // head_num
    heads, numbers = _head_rows(src_indices, 1, head_num), _head_rows(dst_indices, page_size, head_num)
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, source in enumerate(sources.tolist()[:num_layers]):
            rows = _Rows(target.data_ptr() + layer * width, dst_layout_dim // head_num, numbers)
            _copy(_Rows(source, width, heads), rows, width)


def _head_rows(indices: torch.Tensor, page_size: int, head_num: int) -> Any:
    """Row numbers of (token, head) where rows are (page, head, token of the page); with page_size 1: (token, head)."""
    tokens = indices.numpy()[:, None]
    return (tokens // page_size * head_num * page_size + np.arange(head_num) * page_size + tokens % page_size).ravel()


OPERATIONS = (
    transfer_kv_direct,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_per_layer_mla,
    transfer_kv_all_layer_mla,
    transfer_kv_per_layer_mla_pf_lf,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_mamba_pf_lf,
    transfer_kv_mamba_lf_pf,
    transfer_kv_per_layer,
    transfer_kv_all_layer,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_ph_lf,
    transfer_kv_all_layer_lf_ph,
)
