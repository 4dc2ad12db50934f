"""Raw memory: anonymous regions, arrays over addresses, and row copies that Python pays for once per batch."""

import contextlib
import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_sglang.kernels import native
from tutti_sglang.units import align_up

PAGE = 4096
HUGE_PAGE = 2 << 20

_MADV_WIPEONFORK = 18  # Linux 4.14; Python has no name for it
_CHUNK = 256 << 10  # bytes gathered and scattered at a time: half of a small L2 cache holds them
_LARGE_ROW = 64 << 10  # from here on one memmove per row beats gathering

Addresses = npt.NDArray[np.uint64]


def zeros(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """(count,) zeros. np.zeros gives the GIL away from 1 KiB on: beside a busy Python thread that may take 5 ms."""
    return np.frombuffer(bytearray(count * np.dtype(dtype).itemsize), dtype)


class Region:
    """Anonymous memory, zeroed, aligned to 4 KiB (2 MiB when it is that large), in huge pages where there are any.

    A forked child finds zeros there: copy-on-write of a page that a drive is writing to would tear it (open(2), on
    O_DIRECT and fork). It is still the child's to unmap (madvise(2), MADV_WIPEONFORK): with a hole instead, the child
    that forgets the region would unmap whatever of its own had come to lie there.
    """

    def __init__(self, size: int) -> None:
        """`size` in bytes, > 0, rounded up to 4 KiB. Raises OSError when the system refuses it."""
        assert size > 0
        self.size = align_up(size, PAGE)
        alignment = HUGE_PAGE if self.size >= HUGE_PAGE else PAGE
        memory = mmap.mmap(-1, self.size + alignment - PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with contextlib.suppress(OSError):  # a kernel built without it; the memory serves as well
                memory.madvise(advice)
        start = np.frombuffer(memory, dtype=np.uint8)
        offset = -start.ctypes.data % alignment
        self.view = start[offset : offset + self.size]
        self.address = self.view.ctypes.data

    def close(self) -> None:
        """Forget the memory; it is unmapped with the last array over `view`. Bare addresses do not keep it."""
        self.view = np.empty(0, dtype=np.uint8)
        self.address = 0


def memory_limit() -> int:
    """Bytes this process may use: the machine's memory, or less where a control group (v2) says so."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):  # the last: a kernel without groups
        line = next(each for each in Path("/proc/self/cgroup").read_text().splitlines() if each.startswith("0::"))
        group = Path("/sys/fs/cgroup") / line.removeprefix("0::/")
        for folder in (group, *group.parents):
            if (file := folder / "memory.max").exists() and (text := file.read_text().strip()) != "max":
                limit = min(limit, int(text))
    return limit


class _Span:
    """Unowned memory, described to numpy."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
        }


def view(address: int, size: int) -> npt.NDArray[np.uint8]:
    """(size,) the memory at `address` as an array; it is not kept alive."""
    return np.asarray(_Span(address, (size,), "|u1", None))


def windows(addresses: Addresses, size: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """Rows of `size` bytes at (m,) addresses, m > 0, as (array, index): `array[index]` gathers, `array[index] = rows`
    scatters.

    The array has one element of `size` bytes at every byte of the span, so numpy moves a whole row per index, and the
    GIL is free meanwhile.
    """
    low = int(addresses.min())
    index = (addresses - np.uint64(low)).astype(np.int64)
    return np.asarray(_Span(low, (int(index.max()) + 1,), f"|V{size}", (1,))), index


def copy_rows(dst: Addresses, src: Addresses, sizes: npt.ArrayLike) -> None:
    """Copy `sizes[t]` bytes from `src[i, t]` to `dst[i, t]` for each i, t.

    `dst`, `src`: (n, T) addresses of rows that do not overlap; `sizes`: (T,) > 0, in bytes.
    """
    dst, src, row_sizes = check_rows(dst, src, sizes)
    library = native.library()
    if library is None:
        _copy_rows(dst, src, row_sizes)
    else:
        library.tutti_copy_rows(dst.ctypes, src.ctypes, row_sizes.ctypes, *map(ctypes.c_size_t, dst.shape))


def check_rows(*arguments: Any) -> tuple[Any, ...]:
    """Any number of (n, T) address arrays and, last, (T,) sizes → the same as contiguous uint64 arrays."""
    *addresses, sizes = (np.ascontiguousarray(each, dtype=np.uint64) for each in arguments)
    assert all(each.ndim == 2 and each.shape == (len(each), len(sizes)) for each in addresses)
    assert sizes.ndim == 1
    assert (sizes > 0).all()
    return *addresses, sizes


def _copy_rows(dst: Addresses, src: Addresses, sizes: npt.NDArray[np.uint64]) -> None:
    """The twin of the native function."""
    if not len(dst):
        return
    for size in np.unique(sizes).tolist():
        columns = sizes == size
        targets, sources = dst[:, columns].ravel(), src[:, columns].ravel()
        if size >= _LARGE_ROW:
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                ctypes.memmove(target, source, size)
            continue
        into, target_index = windows(targets, size)
        out_of, source_index = windows(sources, size)
        step = max(1, _CHUNK // size)
        for start in range(0, len(targets), step):
            into[target_index[start : start + step]] = out_of[source_index[start : start + step]]
