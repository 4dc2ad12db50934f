"""SGLang's host pools as page maps: where each tensor of a page lies, for every layout that this tier serves.

`layer_first` and `page_first_direct` hold the same tensors (K and V of one layer each), so they share objects;
`page_first` (K and V of all layers) and `page_head` (K and V of a group of heads) have orders of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_sglang.errors import UnsupportedError
from tutti_sglang.layout import Order, PageMap, pages_of


@dataclass(frozen=True)
class PoolView:
    """A host pool as the store sees it.

    `maps`: one PageMap, or one for each group of heads; `heads`: heads of this rank, 0 where they cannot be told apart;
    `sharded`: the bytes differ between TP ranks; `packs_draft`: layers of a draft model follow the model's own;
    `layers`: first and last + 1. `buffers` keeps the memory mapped for as long as we may touch it, whatever the pool
    does with its own reference (HostKVCache.destroy).
    """

    maps: tuple[PageMap, ...]
    dtype: str
    page_size: int
    pages: int
    layers: tuple[int, int]
    heads: int
    sharded: bool
    packs_draft: bool
    buffers: tuple[torch.Tensor, ...]

    @property
    def page_bytes(self) -> int:
        """Payload bytes of one page, all groups."""
        return sum(sum(each.sizes) for each in self.maps)

    def numbers(self, indices: torch.Tensor, keys: int) -> npt.NDArray[np.int64]:
        """Token slots → (keys,) page numbers; AssertionError unless they name `keys` whole, aligned pages of the pool.

        The slots are copied first: they are a view of the pool's free list, which SGLang rewrites when a request is
        aborted while we work.
        """
        slots = indices.detach().to("cpu", torch.int64, copy=True).numpy()
        assert slots.shape == (keys * self.page_size,), (
            f"{keys} keys need {keys * self.page_size} slots, not {slots.shape}"
        )
        pages = pages_of(slots, self.page_size)
        whole = pages[:, None] * self.page_size + np.arange(self.page_size)
        assert np.array_equal(slots.reshape(whole.shape), whole), "the slots are not whole pages"
        assert ((pages >= 0) & (pages < self.pages)).all(), "a page outside the pool"
        return pages


def view_of(pool: Any, groups: int = 1) -> PoolView:
    """The page map of a host pool (sglang mem_cache/pool_host). `groups`: head groups of a page_head pool.

    UnsupportedError names what is served instead.
    """
    codec = _CODECS.get(type(pool).__name__)
    if codec is None:
        raise UnsupportedError(
            f"The host pool {type(pool).__name__} cannot be kept in this tier", f"Served: {', '.join(_CODECS)}"
        )
    if pool.kv_buffer is None or not pool.layer_num:
        raise UnsupportedError(f"The host pool {type(pool).__name__} holds no memory of its own")
    if pool.dcp_size > 1:
        raise UnsupportedError("Decode context parallelism (--dcp-size > 1) is not served", "Start with --dcp-size 1")
    return codec(pool, groups)


def _mha(pool: Any, groups: int) -> PoolView:
    maps = _page_maps(pool.layout, (pool.k_buffer, pool.v_buffer), pool.page_size, groups)
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else (pool.kv_buffer,)
    return _view(pool, maps, buffers, sharded=True)


def _mla(pool: Any, groups: int) -> PoolView:
    if pool.layout == "page_head":
        raise UnsupportedError("MLA has no page_head layout", "Start with --hicache-mem-layout page_first_direct")
    maps = _page_maps(pool.layout, (pool.kv_buffer,), pool.page_size, groups)
    return _view(pool, maps, (pool.kv_buffer,), sharded=False)


_CODECS: dict[str, Callable[[Any, int], PoolView]] = {
    "MHATokenToKVPoolHost": _mha,
    "AsymmetricMHATokenToKVPoolHost": _mha,
    "MLATokenToKVPoolHost": _mla,
}


def _view(pool: Any, maps: tuple[PageMap, ...], buffers: tuple[torch.Tensor, ...], *, sharded: bool) -> PoolView:
    first = pool.start_layer or 0
    return PoolView(
        maps=maps,
        dtype=str(pool.dtype).removeprefix("torch."),
        page_size=pool.page_size,
        pages=pool.page_num,
        layers=(
            first,
            first + pool.layer_num,
        ),  # SGLang's end_layer is the last layer in one place, one more in another
        heads=pool.head_num if pool.layout == "page_head" else 0,
        sharded=sharded,
        packs_draft=pool.layer_num > pool.target_layer_num,
        buffers=buffers,
    )


def _page_maps(layout: str, halves: tuple[torch.Tensor, ...], page_size: int, groups: int) -> tuple[PageMap, ...]:
    """`halves`: K and V (or the one MLA buffer), in the shape that the layout gives them (pool_host/mha.py:305)."""
    assert all(half.is_contiguous() for half in halves)
    match layout:
        case "layer_first":  # (layers, slots, heads, width)
            layers = [[half[layer] for half in halves] for layer in range(len(halves[0]))]
            spans = [_span(part, page_size) for layer in layers for part in layer]
            return (_page_map(Order.LAYER, spans),)
        case "page_first_direct":  # (pages, layers, page_size, heads, width)
            layers = [[half[:, layer] for half in halves] for layer in range(halves[0].shape[1])]
            return (_page_map(Order.LAYER, [_span(part, 1) for layer in layers for part in layer]),)
        case "page_first":  # (slots, layers, heads, width)
            return (_page_map(Order.TOKEN, [_span(half, page_size) for half in halves]),)
        case "page_head":  # (pages, heads, page_size, layers, width)
            heads = halves[0].shape[1]
            if heads % groups:
                raise UnsupportedError(
                    f"{heads} heads of a rank cannot be cut into {groups} groups", "Choose another tp_lcm_size"
                )
            cut = heads // groups
            parts = [[half[:, group * cut : (group + 1) * cut] for half in halves] for group in range(groups)]
            return tuple(_page_map(Order.HEAD, [_span(part, 1) for part in group]) for group in parts)
    raise UnsupportedError(
        f"The host layout {layout} cannot be kept in this tier",
        "Served: --hicache-mem-layout page_first_direct, layer_first, page_first or page_head",
    )


def _span(part: torch.Tensor, rows: int) -> tuple[int, int, int]:
    """(address, stride, size) in bytes of the runs of `rows` rows of `part`; each row must be one contiguous run."""
    assert part[0].is_contiguous()
    assert rows == 1 or part.is_contiguous()
    row = part[0].numel() * part.element_size()
    return part.data_ptr(), part.stride(0) * rows * part.element_size(), row * rows


def _page_map(order: Order, spans: list[tuple[int, int, int]]) -> PageMap:
    base, stride, sizes = zip(*spans, strict=True)
    return PageMap(order=order, base=base, stride=stride, sizes=sizes)
