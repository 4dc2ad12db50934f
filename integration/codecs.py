"""Where each kind of SGLang's host pools keeps the bytes of a page (sglang mem_cache/pool_host, memory_pool_host.py).

A codec reads a pool's own buffers: all that make up a page, scales and side states too. Two layouts share objects
where, and only where, their pages are the same bytes in the same order of tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import sglang
import torch

from tutti_sglang.errors import UnsupportedError
from tutti_sglang.layout import Order, PageMap


class Parts(NamedTuple):
    """What a codec finds.

    `maps`: one PageMap, or one for each group of heads; `buffers`: the memory they point into; `layers`: first and
    last + 1; `pages`: in the pool; `form`: name of a row format that dtype and sizes do not tell; `pool`: where pages
    are copied by the pool's own calls, and `maps` tell only their size.
    """

    maps: tuple[PageMap, ...]
    buffers: tuple[torch.Tensor, ...]
    layers: tuple[int, int]
    pages: int
    dtype: str
    form: str = ""
    heads: int = 0
    sharded: bool = False
    packs_draft: bool = False
    pool: Any = None


Spans = list[tuple[int, int, int]]
"""(address, stride, size) in bytes of each tensor of a page, in order."""


def logical(pool: Any, _: int) -> Parts:
    """An anchor that numbers pages and holds none: its side pools are the page."""
    return Parts((), (), (0, 1), pool.size // pool.page_size, "")


def mha(pool: Any, groups: int) -> Parts:
    """K and V of a rank's heads, of equal width or not."""
    halves = (pool.k_buffer, pool.v_buffer)
    by_head = pool.layout == "page_head"
    maps = _head_maps(halves, groups) if by_head else (_map(pool.layout, halves, pool.page_size),)
    heads = pool.head_num if by_head else 0
    return _kv(pool, maps, halves, form=_device_form(pool))._replace(heads=heads, sharded=True)


def mha_mxfp8(pool: Any, _: int) -> Parts:
    """K and V of eight bits, and the block scales of each page, which the pool keeps beside its kv_buffer."""
    halves = (pool.k_buffer, pool.v_buffer)
    scales = (pool.k_scale_host, pool.v_scale_host)  # (pages, layers, bytes)
    spans = _tokens(halves, pool.page_size) + [span(part, 1) for part in scales]
    parts = _kv(pool, (page_map(Order.TOKEN, spans),), halves + scales)
    return parts._replace(form="mxfp8", sharded=True)


def mha_keys(pool: Any, _: int) -> Parts:
    """K alone, of an index."""
    return _kv(pool, (_map(pool.layout, (pool.k_buffer,), pool.page_size),), (pool.k_buffer,), form="k_only")


def mla(pool: Any, _: int) -> Parts:
    """One latent row for each token, the same on all ranks."""
    if pool.layout == "page_first_kv_split":
        return _mla_split(pool)
    return _kv(pool, (_map(pool.layout, (pool.kv_buffer,), pool.page_size),), (pool.kv_buffer,))


def dsa_indexer(pool: Any, _: int) -> Parts:
    """Packed index keys with their scales, a row for each page and layer."""
    return _rows(pool, pool.index_k_with_scale_buffer, pool.page_num, form="dsa_indexer")


def nvfp4(pool: Any, _: int) -> Parts:
    """Packed four-bit rows with their scales, a row for each page and layer."""
    return _rows(pool, pool.kv_buffer, pool.page_num, form=type(pool).__name__)


def deepseek_v4(pool: Any, _: int) -> Parts:
    """Packed rows of a compressed region, its index or its state, a row for each page and layer."""
    packed = "whole" if getattr(pool, "page_aligned_only", False) else "fused"
    return _rows(pool, pool.kv_buffer, pool.num_host_pages, form=f"{type(pool).__name__}.{packed}")


def mamba(pool: Any, _: int) -> Parts:
    """The state after a page, a slot each: temporal and convolution states of each layer, registered side states."""
    states = [each for each in (pool.temporal_buffer, *pool.conv_buffer) if each.numel()]  # (slots, layers, 1, …)
    spans = _layers(states, range(pool.num_mamba_layers))
    spans += [span(each, 1) for each in pool.slot_state_buffers]
    buffers = (*states, *pool.slot_state_buffers)
    return Parts(
        maps=(page_map(Order.LAYER, spans),),
        buffers=buffers,
        layers=(0, pool.num_mamba_layers),
        pages=pool.page_num,
        dtype=dtype_names(buffers),
        form=state_form(each.shape[3:] for each in states),
        sharded=True,
        packs_draft=bool(pool.mtp_draft_buffer_infos),
    )


def state_form(shapes: Iterable[Sequence[int]]) -> str:
    """How namespaces name the states of a layer: which axis is the window depends on the platform, with as many
    bytes."""
    return "mamba" + "".join(str(tuple(each)).replace(" ", "") for each in shapes)


def copied(pool: Any) -> Parts | None:
    """A pool of another maker: by the calls with which SGLang's own file backend moves pages, if they are its own. What
    it inherits need not know all of its buffers."""
    kind = type(pool)
    if not {"get_data_page", "set_from_flat_data_page", "get_dummy_flat_data_page"} <= vars(kind).keys():
        return None
    try:
        page, target = pool.get_data_page(0).contiguous(), pool.get_dummy_flat_data_page()
    except (NotImplementedError, ValueError):
        return None
    if page.nbytes != target.nbytes or not page.nbytes or not target.is_contiguous() or target.device.type != "cpu":
        return None
    return Parts(
        maps=(PageMap(Order.TOKEN, (0,), (0,), (page.nbytes,)),),
        buffers=(),
        layers=(0, getattr(pool, "layer_num", 1)),
        pages=pool.size // pool.page_size,
        dtype=dtype_name(page.dtype),
        form=f"{kind.__module__}.{kind.__qualname__}.{pool.layout}@{sglang.__version__}",
        sharded=True,
        pool=pool,
    )


def _device_form(pool: Any) -> str:
    """How the device orders the bytes of a page, unless token by token: the host pool copies them as they are."""
    layout: str = pool._buffer_infos[0].buffers.layout.value
    return "" if layout == "nhd" else layout


def _mla_split(pool: Any) -> Parts:
    """Latent and rope in buffers of their own (Ascend); with eight bits the rope lies in the latent's rows."""
    main = (pool.k_buffer,) if pool.dsa_kv_cache_store_fp8 else (pool.k_buffer, pool.v_buffer)
    index = tuple(each for each in (pool.index_k_buffer, pool.index_k_scale_buffer) if each is not None)
    spans = _layers(main, range(pool.layer_num))
    if index:
        spans += _layers(index, range(index[0].shape[1]))
    return _kv(pool, (page_map(Order.LAYER, spans),), main + index, form="kv_split")


def _rows(pool: Any, buffer: Any, pages: int, form: str) -> Parts:
    """A row for each page and layer: in a buffer (layers, pages, …), a list of such layers, or (pages, layers, …)."""
    if pool.layout == "layer_first":
        layers = list(buffer)
        spans = [span(layer, 1) for layer in layers]
        buffers = tuple(layers)
    elif pool.layout in ("page_first", "page_first_direct"):
        spans = _layers((buffer,), range(pool.layer_num))
        buffers = (buffer,)
    else:
        raise _unknown_layout(pool.layout)
    return _kv(pool, (page_map(Order.LAYER, spans),), buffers, form=form)._replace(pages=pages)


def _kv(pool: Any, maps: tuple[PageMap, ...], buffers: tuple[torch.Tensor, ...], form: str = "") -> Parts:
    first = pool.start_layer or 0
    return Parts(
        maps=maps,
        buffers=buffers,
        # SGLang's end_layer is the last layer in one place, one more in another.
        layers=(first, first + pool.layer_num),
        pages=getattr(pool, "page_num", 0),
        dtype=dtype_name(pool.dtype),
        form=form,
        packs_draft=pool.layer_num > getattr(pool, "target_layer_num", pool.layer_num),
    )


def _map(layout: str, halves: tuple[torch.Tensor, ...], page_size: int) -> PageMap:
    """`halves`: K and V (or one latent buffer), in the shape that the layout gives them (pool_host/mha.py:305)."""
    match layout:
        case "layer_first":  # (layers, slots, heads, width)
            assert all(half.is_contiguous() for half in halves)
            layers = zip(*halves, strict=True)
            return page_map(Order.LAYER, [span(part, page_size) for part in chain.from_iterable(layers)])
        case "page_first_direct":  # (pages, layers, page_size, heads, width)
            return page_map(Order.LAYER, _layers(halves, range(halves[0].shape[1])))
        case "page_first":  # (slots, layers, heads, width)
            return page_map(Order.TOKEN, _tokens(halves, page_size))
    raise _unknown_layout(layout)


def _head_maps(halves: tuple[torch.Tensor, ...], groups: int) -> tuple[PageMap, ...]:
    """(pages, heads, page_size, layers, width), cut into groups of heads."""
    heads = halves[0].shape[1]
    if heads % groups:
        raise UnsupportedError(
            f"{heads} heads of a rank cannot be cut into {groups} groups", "Choose another tp_lcm_size"
        )
    cut = heads // groups
    parts = [[half[:, group * cut : (group + 1) * cut] for half in halves] for group in range(groups)]
    return tuple(page_map(Order.HEAD, [span(part, 1) for part in group]) for group in parts)


def _layers(buffers: Sequence[torch.Tensor], layers: Iterable[int]) -> Spans:
    """Of buffers (pages, layers, …): the parts of the first layer, then those of the second …"""
    return [span(buffer[:, layer], 1) for layer in layers for buffer in buffers]


def _tokens(halves: tuple[torch.Tensor, ...], page_size: int) -> Spans:
    """Of buffers (slots, layers, …): all layers in one."""
    return [span(half, page_size) for half in halves]


def span(part: torch.Tensor, rows: int) -> tuple[int, int, int]:
    """(address, stride, size) in bytes of the runs of `rows` rows of `part`; each run must be one piece of memory."""
    assert part[0].is_contiguous()
    assert rows == 1 or part.is_contiguous()
    row = part[0].numel() * part.element_size()
    return part.data_ptr(), part.stride(0) * rows * part.element_size(), row * rows


def page_map(order: Order, spans: Spans) -> PageMap:
    """The map whose tensors are these spans."""
    base, stride, sizes = zip(*spans, strict=True)
    return PageMap(order=order, base=base, stride=stride, sizes=sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """As namespaces name it."""
    return str(dtype).removeprefix("torch.")


def dtype_names(buffers: Iterable[torch.Tensor]) -> str:
    """Of buffers of several types."""
    return "+".join(dict.fromkeys(dtype_name(each.dtype) for each in buffers))


def _unknown_layout(layout: str) -> UnsupportedError:
    return UnsupportedError(
        f"The host layout {layout} of this pool cannot be kept in this tier",
        "Start with --hicache-mem-layout page_first_direct",
    )


Codec = Callable[[Any, int], Parts]

CODECS: dict[str, Codec] = {
    "MHATokenToKVPoolHost": mha,
    "AsymmetricMHATokenToKVPoolHost": mha,
    "MHATokenToKVPoolMXFP8Host": mha_mxfp8,
    "MHATokenToKOnlyPoolHost": mha_keys,
    "MLATokenToKVPoolHost": mla,
    "MambaPoolHost": mamba,
    "DSAIndexerPoolHost": dsa_indexer,
    "QSAIndexerPoolHost": deepseek_v4,
    "DeepSeekV4PagedHostPool": deepseek_v4,
    "DeepSeekV4StateHostPool": deepseek_v4,
    "MiniMaxM3Nvfp4MainKVPoolHost": nvfp4,
    "MiniMaxM3Nvfp4IndexKPoolHost": nvfp4,
    "LogicalHostPool": logical,
}
"""By the exact class: a subclass may keep bytes elsewhere (the scales of MXFP8), and serving half a page is worse than
serving none."""

REFUSED: dict[str, tuple[str, str]] = {
    "UnifiedPageEnvelopeHostPool": (
        "its pages move in memory, and SGLang gives them only to backends it knows",
        "Start the server with this backend, not attach it later: SGLang then makes pools that stay where they are",
    ),
    "PageInterleaveHostPool": (
        "the pages of one prefix belong to different ranks, which SGLang stores in no backend",
        "Start without KV cache sharding",
    ),
    "HiSparseMHATokenToKVPoolHost": (
        "it holds the tokens of running requests, no pages of prefixes",
        "Start without HiSparse",
    ),
}
"""Why, and what to do."""
