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
from tutti_sglang.integration.codecs import dtype_name, page_map, span
from tutti_sglang.integration.pools import PoolView
from tutti_sglang.layout import Order

_SERVED = ("MHATokenToKVPool", "MLATokenToKVPool")
_COMPONENTS = ("FULL", "SWA")


@dataclass(frozen=True)
class DevicePool:
    """`layers`: for each layer that the forward pass waits for, the tensors of a page that it reads from this pool."""

    name: str
    view: PoolView
    layers: tuple[slice, ...]


def device_pools(kvcache: Any, components: Iterable[Any]) -> dict[str, DevicePool]:
    """The pools that the components of SGLang's tree (ComponentType) keep pages in. UnsupportedError names what is not
    served."""
    names = {component.name for component in components}
    if extra := sorted(names - set(_COMPONENTS)):
        raise UnsupportedError(
            f"The direct path does not keep the state of {', '.join(extra)} layers",
            'Set "path": "host" in the extra config, which keeps their attention layers',
        )
    if "SWA" not in names:
        first = kvcache.start_layer
        return {PoolName.KV: _pool(PoolName.KV, kvcache, range(first, first + kvcache.layer_num), first)}
    if type(kvcache).__name__ != "SWAKVPool":
        raise _unsupported(kvcache)
    by_pool: dict[bool, list[int]] = {False: [], True: []}
    for layer, (_, windowed) in sorted(kvcache.layers_mapping.items()):
        by_pool[windowed].append(layer)
    parts = ((PoolName.KV, kvcache.full_kv_pool, False), (PoolName.SWA, kvcache.swa_kv_pool, True))
    return {name: _pool(name, pool, by_pool[windowed], kvcache.start_layer) for name, pool, windowed in parts}


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
        f"Served: {', '.join(_SERVED)}, and SWAKVPool of these. {_HINT} for others",
    )


def is_reachable(pool: DevicePool) -> bool:
    """Whether the CPU reads and writes the pool's memory by its addresses."""
    return all(buffer.device == torch.device("cpu") for buffer in pool.view.buffers)
