"""SGLang's device pools as page maps: where each tensor of a page lies, and which layer waits for it.

The order of tensors is that of the host path with a layer-major layout: K and V of layer 0, K and V of layer 1 … so
both paths share namespaces and objects.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout
from sglang.srt.mem_cache.hicache_storage import PoolName

from tutti_sglang.errors import UnsupportedError
from tutti_sglang.integration.codecs import dtype_name, dtype_names, page_map, span, state_form
from tutti_sglang.integration.pools import PoolView
from tutti_sglang.layout import Order

_SERVED = ("MHATokenToKVPool", "MLATokenToKVPool")
_COMPONENTS = ("FULL", "SWA", "MAMBA")


@dataclass(frozen=True)
class DevicePool:
    """`layers`: for each layer that the forward pass waits for, the tensors of a page that it reads from this pool."""

    name: str
    view: PoolView
    layers: tuple[slice, ...]


def device_pools(kvcache: Any, components: Iterable[Any], requests: Any = None) -> dict[str, DevicePool]:
    """The pools that the components of SGLang's tree (ComponentType) keep pages in. `requests`: SGLang's pool of
    requests, which owns the states of hybrid models. UnsupportedError names what is not served."""
    names = {component.name for component in components}
    if extra := sorted(names - set(_COMPONENTS)):
        raise UnsupportedError(f"The direct path does not keep the state of {', '.join(extra)} layers", _HINT)
    first = kvcache.start_layer
    if "MAMBA" in names:
        if "SWA" in names or type(kvcache).__name__ != "HybridLinearKVPool":
            raise _unsupported(kvcache)
        attention = _pool(PoolName.KV, kvcache.full_kv_pool, kvcache.full_attention_layer_id_mapping, first)
        return {PoolName.KV: attention, PoolName.MAMBA: _states(requests.mamba_pool, first)}
    if "SWA" not in names:
        return {PoolName.KV: _pool(PoolName.KV, kvcache, range(first, first + kvcache.layer_num), first)}
    if type(kvcache).__name__ != "SWAKVPool":
        raise _unsupported(kvcache)
    by_pool: dict[bool, list[int]] = {False: [], True: []}
    for layer, (_, windowed) in sorted(kvcache.layers_mapping.items()):
        by_pool[windowed].append(layer)
    parts = ((PoolName.KV, kvcache.full_kv_pool, False), (PoolName.SWA, kvcache.swa_kv_pool, True))
    return {name: _pool(name, pool, by_pool[windowed], first) for name, pool, windowed in parts}


def _pool(name: str, pool: Any, layer_ids: Iterable[int], first: int) -> DevicePool:
    if type(pool).__name__ not in _SERVED:
        raise _unsupported(pool)
    (info,) = pool.get_device_pool_infos()
    info = info.buffer_info
    if info.scales is not None or getattr(info, "transfer_buffers", None) is not None:
        raise UnsupportedError(f"The pool {type(pool).__name__} keeps scales or moves its memory", _HINT)
    form, halves = "", [info.buffers]
    if type(pool).__name__ == "MHATokenToKVPool":
        form, halves = _form(info.buffers.layout), [info.buffers.k, info.buffers.v]
    rows = 1 if form else info.page_size  # of a buffer, for a page
    spans = [span(half[layer], rows) for layer in range(pool.layer_num) for half in halves]
    first_buffer = halves[0][0]
    view = PoolView(
        maps=(page_map(Order.LAYER, spans),),
        dtype=f"{dtype_name(info.dtype)}:{form}" if form else dtype_name(info.dtype),
        page_size=info.page_size,
        pages=first_buffer.shape[0] // rows,
        layers=(pool.start_layer, pool.start_layer + pool.layer_num),
        heads=0,
        sharded=len(halves) == 2,
        packs_draft=False,
        buffers=tuple(buffer for half in halves for buffer in half),
    )
    return DevicePool(name, view, _layers(list(layer_ids), first, len(halves)))


def _states(pool: Any, first: int) -> DevicePool:
    """The states of Mamba and linear attention: a page is one slot, what is left of a prefix at its end. Bytes and
    order are those of the host path (codecs.mamba)."""
    if type(pool).__name__ != "MambaPool":
        raise _unsupported(pool)
    (info,) = pool.get_device_pool_infos()
    layer_ids, info = list(info.layer_ids), info.buffer_info
    states = [each for each in (info.temporal, *info.conv) if each.numel()]  # (layers, slots, …)
    if info.extra_checkpoint_buffers or not all(each[0, 0].is_contiguous() for each in states):
        raise UnsupportedError("The pool of states keeps side states, or cuts a state into pieces", _HINT)
    view = PoolView(
        maps=(page_map(Order.LAYER, [span(each[layer], 1) for layer in range(len(layer_ids)) for each in states]),),
        dtype=f"{dtype_names(states)}:{state_form(each.shape[2:] for each in states)}",
        page_size=1,
        pages=states[0].shape[1],
        layers=(0, len(layer_ids)),
        heads=0,
        sharded=True,
        packs_draft=False,
        buffers=tuple(states),
    )
    return DevicePool(PoolName.MAMBA, view, _layers(layer_ids, first, len(states)))


def _form(layout: KVBufferLayout) -> str:
    """How the bytes of a page are ordered, in the words of the host path; empty = token by token."""
    if layout is KVBufferLayout.NHD:
        return ""
    if layout is KVBufferLayout.HND:
        return "hnd"
    raise UnsupportedError(f"The device layout {layout.value} is not served by the direct path", _HINT)


def _layers(layer_ids: list[int], first: int, tensors: int) -> tuple[slice, ...]:
    """Layers that lie in another pool need none of this one's tensors."""
    places = {layer - first: place for place, layer in enumerate(layer_ids)}
    cuts = []
    for layer in range(max(places) + 1):
        place = places.get(layer)
        cuts.append(slice(0, 0) if place is None else slice(place * tensors, (place + 1) * tensors))
    return tuple(cuts)


_HINT = 'Set "path": "host" in the extra config'


def _unsupported(pool: Any) -> UnsupportedError:
    return UnsupportedError(
        f"The device pool {type(pool).__name__} is not served by the direct path",
        f"Served: {', '.join(_SERVED)}, and SWAKVPool and HybridLinearKVPool of these. {_HINT} for others",
    )


def is_reachable(pool: DevicePool) -> bool:
    """Whether the CPU reads and writes the pool's memory by its addresses."""
    return all(buffer.device == torch.device("cpu") for buffer in pool.view.buffers)
