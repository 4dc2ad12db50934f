"""Real SGLang host pools of models with more than one, on the CPU, small and unpinned: one maker for each class."""

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    KVScaleBuffers,
    KVScaleLayout,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
    MLASplitBuffers,
    PageRowBufferInfo,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKOnlyPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host import mha, mha_mxfp8
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host
from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4IndexKPoolHost, MiniMaxM3Nvfp4MainKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost
from sglang.srt.runtime_context import get_parallel

from tests.integration.host_pools import HEADS, LAYERS, mha_pool, mla_pool, slots

CPU = torch.device("cpu")


def mamba_pool(
    layout: str = "page_first_direct",
    *,
    temporal: int = 24,
    side: bool = False,
    conv: Sequence[tuple[int, int]] = ((40, 3), (8, 3)),
) -> MambaPoolHost:
    """A host pool of 17 states. `temporal`: its width, 0 for a model of convolutions; `side`: with states that other
    layers registered."""
    layers, slots = LAYERS, 8
    info = MambaStateBufferInfo(
        temporal=torch.zeros(layers, slots, 2, temporal, 4, dtype=torch.float32),
        conv=tuple(torch.zeros(layers, slots, *each, dtype=torch.bfloat16) for each in conv),
        extra_checkpoint_buffers=(torch.zeros(slots, 7, dtype=torch.uint8), torch.zeros(slots, 5, dtype=torch.int64))
        if side
        else (),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout=layout)


def dsa_indexer_pool(layout: str = "page_first_direct", *, skipped: int = 1) -> DSAIndexerPoolHost:
    """The index of an MLA pool of 17 pages; `skipped` layers share the index of another."""
    capacity = 8 * 64
    with get_parallel().override(attn_dcp_size=1):
        device = DSATokenToKVPool(
            size=capacity,
            page_size=64,
            kv_lora_rank=24,
            dtype=torch.bfloat16,
            qk_rope_head_dim=8,
            layer_num=LAYERS,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=32,
            skip_topk_layers=[layer < skipped for layer in range(LAYERS)],
        )
    return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), mla_pool(layout, 64), pin_memory=False)


def key_pool(layout: str = "page_first_direct") -> MHATokenToKOnlyPoolHost:
    """The keys of an index beside an MHA pool of 17 pages."""
    anchor = mha_pool(layout)
    device = MHATokenToKOnlyPool(
        size=anchor.size,
        page_size=anchor.page_size,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKOnlyPoolHost(device, anchor, layout, pin_memory=False)


def deepseek_v4_pool(
    layout: str = "page_first_direct", *, item_bytes: int = 584, page_size: int = 64, whole: bool = True
) -> DeepSeekV4PagedHostPool:
    """A compressed region of 17 pages."""
    buffers = [torch.zeros(9, item_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool(
        "c4", buffers, item_bytes, 17, page_size, layout, pin_memory=False, page_aligned_only=whole
    )


def deepseek_v4_state_pool(layout: str = "page_first_direct", *, page_size: int = 64) -> DeepSeekV4StateHostPool:
    """The state of a compressed region, a ring for each of 17 pages of the sliding window."""
    state = [SimpleNamespace(kv_score=torch.zeros(9 * 4, 2, 6)) for _ in range(LAYERS)]
    pools = [SimpleNamespace(kv_score_buffer=each, ring_size=4) for each in state]
    return DeepSeekV4StateHostPool("c4_state", pools, 17, page_size, layout, pin_memory=False)


def qsa_indexer_pool(layout: str = "page_first_direct") -> QSAIndexerPoolHost:
    """Compressed keys beside an MHA pool of 17 pages."""
    anchor = mha_pool(layout)
    keys = [torch.zeros(9 * 4, 1, 16, dtype=torch.bfloat16) for _ in range(LAYERS)]
    return QSAIndexerPoolHost(SimpleNamespace(qsa_compress_ratio=4, qsa_compressed_k_buffer_pool=keys), anchor)


def _page_rows(row_bytes: int) -> PageRowBufferInfo:
    slab = torch.zeros(LAYERS, 9, row_bytes, dtype=torch.uint8)
    return PageRowBufferInfo(slab=slab, rows=tuple(slab), row_bytes=row_bytes, page_size=128, num_pages=9)


def nvfp4_main_pool(layout: str = "page_first_direct") -> MiniMaxM3Nvfp4MainKVPoolHost:
    """Four-bit K and V with scales, 17 pages."""
    return MiniMaxM3Nvfp4MainKVPoolHost(
        _page_rows(1280),
        2.0,
        0,
        128,
        layout,
        pin_memory=False,
        device_capacity_tokens=8 * 128,
        start_layer=0,
        end_layer=LAYERS,
    )


def nvfp4_index_pool(layout: str = "page_first_direct") -> MiniMaxM3Nvfp4IndexKPoolHost:
    """Four-bit index keys with scales, 17 pages."""
    anchor = nvfp4_main_pool(layout)
    return MiniMaxM3Nvfp4IndexKPoolHost(
        _page_rows(384), anchor, layout, pin_memory=False, start_layer=0, end_layer=LAYERS
    )


def mxfp8_pool(layout: str = "page_first") -> MHATokenToKVPoolMXFP8Host:
    """Eight-bit K and V with block scales, 17 pages. SGLang asks for a CUDA kernel that only the transfer needs."""
    page_size, pages = 128, 9
    rows = [torch.zeros(page_size * pages, HEADS, 32, dtype=torch.float8_e4m3fn) for _ in range(LAYERS)]
    scales = tuple(torch.zeros(pages, HEADS, 32, page_size // 32, 1, dtype=torch.uint8) for _ in range(LAYERS))
    pointers = torch.tensor([each.data_ptr() for each in rows], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(rows), v=tuple(rows), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
        ),
        page_size=page_size,
        head_num=HEADS,
        head_dim=32,
        v_head_dim=32,
        dtype=torch.float8_e4m3fn,
        device=CPU,
        scales=KVScaleBuffers(k=scales, v=scales, layout=KVScaleLayout.MXFP8_INTERLEAVED),
    )
    kinds = (mha, mha_mxfp8)
    asked = [kind.can_use_write_back_jit_kernel for kind in kinds]
    staged = MHATokenToKVPoolMXFP8Host._init_write_back_staging_buffers
    try:
        mha_mxfp8.can_use_write_back_jit_kernel = lambda **_: True
        MHATokenToKVPoolMXFP8Host._init_write_back_staging_buffers = _staged  # type: ignore[method-assign]
        return MHATokenToKVPoolMXFP8Host(
            info,
            2.0,
            0,
            page_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=8 * page_size,
            start_layer=0,
            end_layer=LAYERS,
        )
    finally:
        for kind, before in zip(kinds, asked, strict=True):
            kind.can_use_write_back_jit_kernel = before
        MHATokenToKVPoolMXFP8Host._init_write_back_staging_buffers = staged  # type: ignore[method-assign]


def _staged(pool: Any, *_: Any) -> None:
    pool.can_use_write_back_jit, pool.staging_page_capacity = True, 1


def split_pool(
    layout: str = "page_first_kv_split", *, packed: bool = False, index: bool = True
) -> MLATokenToKVPoolHost:
    """Latent and rope in buffers of their own, and an index with scales; `packed`: the rope is in the latent's rows."""
    k_width = 40 if packed else 24
    native = MLASplitBuffers(
        k=torch.zeros(LAYERS, 9, 16, 1, k_width, dtype=torch.bfloat16),
        v=torch.zeros(LAYERS, 9, 16, 1, 8, dtype=torch.bfloat16),
        index_k=torch.zeros(2, 9, 16, 1, 12, dtype=torch.bfloat16) if index else None,
        index_scales=torch.zeros(2, 9, 16, 1, 1) if index else None,
        index_layer_indices=(0, 2) if index else (),
        k_width=k_width,
        v_width=8,
        index_width=12,
    )
    info = MLABufferInfo(
        buffers=native,
        data_ptrs=None,
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=16,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        kv_cache_dim=k_width,
        dtype=torch.bfloat16,
        device=CPU,
        packed_fp8=packed,
    )
    return MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        16,
        layout,
        pin_memory=False,
        device_capacity_tokens=8 * 16,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def logical_pool(layout: str = "page_first_direct", *, page_size: int = 64) -> LogicalHostPool:
    """An anchor of 17 pages that holds nothing."""
    return LogicalHostPool(17 * page_size, page_size, layout)


MEMORY = (
    *("kv_buffer", "k_buffer", "v_buffer", "k_scale_host", "v_scale_host", "index_k_buffer", "index_k_scale_buffer"),
    *("index_k_with_scale_buffer", "temporal_buffer", "conv_buffer", "slot_state_buffers"),
)


def memory(pool: Any) -> list[torch.Tensor]:
    """Every host tensor of a pool, by the names that SGLang's classes give them."""
    values = [getattr(pool, name, None) for name in MEMORY]
    parts = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
    return [part for part in parts if part is not None and part.numel()]


def randomize(pool: Any, seed: int) -> None:
    """Random bytes everywhere."""
    torch.manual_seed(seed)
    for part in memory(pool):
        part.view(torch.uint8).random_(0, 256)


def page_bytes(pool: Any, page: int) -> bytes:
    """A page as the pool itself reads it: flat, or by the addresses it gives out; MXFP8 does neither."""
    if type(pool).__name__ == "MHATokenToKVPoolMXFP8Host":
        tokens = slice(page * pool.page_size, (page + 1) * pool.page_size)
        parts = [pool.k_buffer[tokens], pool.v_buffer[tokens], pool.k_scale_host[page], pool.v_scale_host[page]]
        return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    try:
        data = pool.get_data_page(page * pool.page_size)
    except (NotImplementedError, ValueError):
        pointers, sizes = pool.get_page_buffer_meta(slots(pool, [page]))
        return b"".join(ctypes.string_at(each, size) for each, size in zip(pointers, sizes, strict=True))
    return bytes(data.contiguous().view(torch.uint8).numpy().tobytes())


def contents(pool: Any) -> list[bytes]:
    """All 17 pages."""
    return [page_bytes(pool, page) for page in range(17)]
