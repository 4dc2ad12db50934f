"""Where the tensors of a page lie in a buffer: base addresses and page strides. Pure arithmetic on integers and numpy
arrays.

The native library does the same in one step: numpy gives the GIL away for arrays of this size, and beside a busy Python
thread each time costs up to a switch interval (5 ms).
"""

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_sglang.kernels import native


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
        library = native.library()
        if library is None:
            return base + pages.astype(np.uint64)[:, None] * stride
        pages = np.ascontiguousarray(pages, dtype=np.int64)
        out = np.empty((len(pages), len(base)), dtype=np.uint64)
        arguments = base.ctypes.data, stride.ctypes.data, len(base), out.ctypes.data
        library.tutti_page_rows(pages.ctypes.data, len(pages), *arguments)
        return out


def pages_of(slots: npt.NDArray[np.int64], page_size: int, end: int) -> npt.NDArray[np.int64]:
    """(n * page_size,) token slots (sglang HiCacheController) → (n,) page numbers. AssertionError unless they are
    whole, aligned pages before page `end`.

    `slots` is looked at once: it may be a view of the pool's free list, which SGLang rewrites when a request is
    aborted."""
    assert len(slots) % page_size == 0, "half a page"
    library = native.library()
    if library is None:
        table = slots.reshape(-1, page_size).copy()
        pages = table[:, 0] // page_size
        assert np.array_equal(table, pages[:, None] * page_size + np.arange(page_size)), "the slots are not whole pages"
        assert ((pages >= 0) & (pages < end)).all(), "a page outside the pool"
        return np.asarray(pages)
    slots = np.ascontiguousarray(slots, dtype=np.int64)
    pages = np.empty(len(slots) // page_size, dtype=np.int64)
    good = library.tutti_pages(slots.ctypes.data, len(pages), page_size, end, pages.ctypes.data)
    assert good, "the slots are not whole pages of the pool"
    return pages
