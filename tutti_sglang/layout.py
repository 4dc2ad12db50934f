"""Where the tensors of a page lie in a buffer: base addresses and page strides. Pure arithmetic on integers and numpy
arrays."""

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class Order(enum.StrEnum):
    """How an object is cut into tensors: K or V of one layer each, or K or V of all layers each."""

    LAYER = "layer"
    TOKEN = "token"
    HEAD = "head"


@dataclass(frozen=True)
class PageMap:
    """A buffer of equal pages: tensor `t` of page `p` lies at `base[t] + p * stride[t]`, `sizes[t]` bytes long.

    `base` in bytes of address space, `stride` in bytes; all of length T, in the order of the object's tensors.
    """

    order: Order
    base: tuple[int, ...]
    stride: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.base) == len(self.stride) == len(self.sizes) > 0
        assert all(size > 0 for size in self.sizes)

    def rows(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """(n,) page numbers → (n, T) addresses."""
        base = np.asarray(self.base, dtype=np.uint64)
        stride = np.asarray(self.stride, dtype=np.uint64)
        return base + pages.astype(np.uint64)[:, None] * stride


def pages_of(indices: npt.NDArray[np.int64], page_size: int) -> npt.NDArray[np.int64]:
    """Token slots, page-contiguous and page-aligned (sglang HiCacheController) → page numbers."""
    assert len(indices) % page_size == 0
    return np.asarray(indices[::page_size] // page_size)
