"""SGLang's own host pools on the CPU, in shapes of real models, one for each page size."""

from typing import Any, NamedTuple

from tutti_sglang.units import format_size


class Shape(NamedTuple):
    """What decides the bytes of a page of dense attention in bfloat16."""

    layers: int
    page_size: int
    heads: int
    head_dim: int

    @property
    def page_bytes(self) -> int:
        """K and V of all its layers, tokens and heads."""
        return 2 * self.layers * self.page_size * self.heads * self.head_dim * 2


SHAPES = {
    shape.page_bytes: shape
    for shape in (
        Shape(2, 16, 2, 64),  # 16 KiB, in tensors of 4 KiB, the smallest that no drive pads
        Shape(8, 16, 2, 64),  # 64 KiB, likewise
        Shape(16, 16, 4, 64),  # 256 KiB: a rank of Llama-3.2-1B under TP 2, page size 16
        Shape(16, 16, 8, 64),  # 512 KiB: the same, whole
        Shape(32, 16, 4, 128),  # 1 MiB: a rank of Llama-3-8B under TP 2, page size 16
        Shape(32, 16, 8, 128),  # 2 MiB: the same, whole
        Shape(32, 32, 8, 128),  # 4 MiB: at page size 32
        Shape(32, 64, 8, 128),  # 8 MiB: at page size 64, the tier's default
    )
}


def shape_of(page_bytes: int) -> Shape:
    """The shape whose page has `page_bytes` bytes. Raises ValueError for a size that has none."""
    if page_bytes not in SHAPES:
        known = ", ".join(map(format_size, SHAPES))
        raise ValueError(f"No shape for pages of {format_size(page_bytes)}; there are {known}")
    return SHAPES[page_bytes]


def device_pool(shape: Shape) -> Any:
    """An MHATokenToKVPool of two pages on the CPU."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=shape.page_size,
        page_size=shape.page_size,
        dtype=torch.bfloat16,
        head_num=shape.heads,
        head_dim=shape.head_dim,
        layer_num=shape.layers,
        device="cpu",
        enable_memory_saver=False,
    )


def host_pool(shape: Shape, pages: int, layout: str) -> Any:
    """An MHATokenToKVPoolHost of `pages` pages, unpinned, beside a device pool of two pages on the CPU."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = device_pool(shape)
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=shape.page_size,
        layout=layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=shape.page_size,
        start_layer=0,
        end_layer=shape.layers,
        host_token_capacity=pages * shape.page_size,
    )
