"""SGLang's host pools as the store sees them: page maps, and what they say about who may read the pages."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_sglang.errors import UnsupportedError
from tutti_sglang.integration.codecs import CODECS, REFUSED, copied
from tutti_sglang.layout import PageMap, pages_of


@dataclass(frozen=True)
class PoolView:
    """A host pool as the store sees it.

    `maps`: one PageMap, or one for each group of heads, none of a logical pool; `dtype`: with the row format, where
    there is one; `page_size`: slots of a page; `heads`: heads of this rank, 0 where they cannot be told apart;
    `sharded`: the bytes differ between TP ranks; `packs_draft`: layers of a draft model follow the model's own;
    `layers`: first and last + 1. `buffers` keeps the memory mapped for as long as we may touch it, whatever the pool
    does with its own reference (HostKVCache.destroy). `pool`: one that copies pages itself and has no addresses; its
    `maps` tell only the size.
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
    pool: Any = None

    @property
    def logical(self) -> bool:
        """Whether the pool only numbers pages and holds no bytes."""
        return not self.maps

    @property
    def page_bytes(self) -> int:
        """Payload bytes of one page, all groups."""
        return sum(sum(each.sizes) for each in self.maps)

    def numbers(self, indices: torch.Tensor, keys: int) -> npt.NDArray[np.int64]:
        """Token slots → (keys,) page numbers; AssertionError unless they are whole, aligned pages of the pool."""
        if indices.device.type != "cpu" or indices.dtype != torch.int64:
            indices = indices.to("cpu", torch.int64)
        slots = indices.numpy()
        assert slots.shape == (keys * self.page_size,), (
            f"{keys} keys need {keys * self.page_size} slots, not {slots.shape}"
        )
        return pages_of(slots, self.page_size, self.pages)


def view_of(pool: Any, groups: int = 1) -> PoolView:
    """The page map of a host pool. `groups`: head groups of a page_head pool.

    UnsupportedError says what to do instead.
    """
    kind = type(pool).__name__
    if kind in REFUSED:
        reason, hint = REFUSED[kind]
        raise UnsupportedError(f"The host pool {kind} cannot be kept in this tier: {reason}", hint)
    if getattr(pool, "dcp_size", 1) > 1:
        raise UnsupportedError("Decode context parallelism (--dcp-size > 1) is not served", "Start with --dcp-size 1")
    if kind not in CODECS:
        parts = copied(pool)
        if parts is None:
            raise UnsupportedError(
                f"The host pool {kind} cannot be kept in this tier: it is not known", f"Served: {', '.join(CODECS)}"
            )
    elif kind != "LogicalHostPool" and _is_empty(pool):
        raise UnsupportedError(
            f"The host pool {kind} holds no memory of its own",
            "Start without sharing the host memory of MLA pools between ranks",
        )
    else:
        parts = CODECS[kind](pool, groups)
    return PoolView(
        maps=parts.maps,
        dtype=f"{parts.dtype}:{parts.form}" if parts.form else parts.dtype,
        page_size=pool.page_size,
        pages=parts.pages,
        layers=parts.layers,
        heads=parts.heads,
        sharded=parts.sharded,
        packs_draft=parts.packs_draft,
        buffers=parts.buffers,
        pool=parts.pool,
    )


def _is_empty(pool: Any) -> bool:
    """Whether its memory is on another rank, or given back."""
    return getattr(pool, "_is_dummy", False) or getattr(pool, "_destroyed", False) or not getattr(pool, "layer_num", 1)
