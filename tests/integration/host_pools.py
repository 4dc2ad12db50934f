"""Real SGLang pools on the CPU, small and unpinned, and the configuration that SGLang hands over with them."""

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

LAYERS, HEADS, WIDTH = 3, 4, 8


def mha_pool(
    layout: str = "page_first_direct",
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
    *,
    pages: int = 8,
    heads: int = HEADS,
    v_width: int = WIDTH,
    layers: int = LAYERS,
    width: int = WIDTH,
) -> Any:
    """A host pool of 2 * `pages` + 1 pages."""
    capacity = pages * page_size
    device = mha_device(page_size, dtype, pages=pages, heads=heads, v_width=v_width, layers=layers, width=width)
    kind = MHATokenToKVPoolHost if v_width == width else AsymmetricMHATokenToKVPoolHost
    return _host(kind, device, capacity, page_size, layout, layers)


def mha_device(
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
    *,
    pages: int = 8,
    heads: int = HEADS,
    v_width: int = WIDTH,
    layers: int = LAYERS,
    width: int = WIDTH,
) -> MHATokenToKVPool:
    """What a host pool mirrors."""
    return MHATokenToKVPool(
        size=pages * page_size,
        page_size=page_size,
        dtype=dtype,
        head_num=heads,
        head_dim=width,
        v_head_dim=v_width,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def mla_pool(
    layout: str = "page_first_direct",
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
    *,
    pages: int = 8,
    layers: int = LAYERS,
) -> Any:
    """A host pool of 2 * `pages` + 1 pages."""
    device = mla_device(page_size, dtype, pages=pages, layers=layers)
    return _host(MLATokenToKVPoolHost, device, pages * page_size, page_size, layout, layers, target_layer_num=layers)


def mla_device(
    page_size: int = 16, dtype: torch.dtype = torch.float16, *, pages: int = 8, layers: int = LAYERS
) -> MLATokenToKVPool:
    """What a host pool mirrors."""
    return MLATokenToKVPool(
        size=pages * page_size,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def _host(kind: Any, device: Any, capacity: int, page_size: int, layout: str, layers: int, **more: Any) -> Any:
    with host_memory_budget_scope(1 << 30):
        return kind(
            device.get_device_pool_infos()[0].buffer_info,
            host_to_device_ratio=2.0,
            host_size=0,
            page_size=page_size,
            layout=layout,
            pin_memory=False,
            device_capacity_tokens=capacity,
            start_layer=0,
            end_layer=layers,
            **more,
        )


def fill(pool: Any, seed: int) -> None:
    """Random bytes everywhere."""
    torch.manual_seed(seed)
    for buffer in pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else (pool.kv_buffer,):
        buffer.view(torch.uint8).random_(0, 256)


def slots(pool: Any, pages: list[int]) -> torch.Tensor:
    """Token slots of `pages`, as the pool's alloc() gives them."""
    return torch.cat([torch.arange(p * pool.page_size, (p + 1) * pool.page_size) for p in pages]).to(torch.int64)


def storage(**changed: Any) -> HiCacheStorageConfig:
    """What SGLang hands over for a plain server of one rank, but for `changed`."""
    plain: dict[str, Any] = {
        **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1},
        **{"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "m"},
    }
    return HiCacheStorageConfig(**(plain | changed))
