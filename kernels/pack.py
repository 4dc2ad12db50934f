"""Paged device pools ⇄ Tensor-Stripe order, many pages and tensors in one launch, with the checksum's block sums of the
very bytes that were moved.

Dense order is token by token, head by head, whatever the pool's own order is, so that pools in NHD and HND exchange
objects. Two movers with one contract: `TritonPack` for a GPU (its dense side may be pinned host memory), `TorchPack`,
its twin, for the CPU and as the reference in tests.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from tutti_sglang import memory
from tutti_sglang.checksum import BLOCK, KEYS, WORDS

_FIELDS = 7  # of a row of the kernel's table


class Paged(NamedTuple):
    """One paged buffer of a pool. Part j of row i of page p (head j of token i, say) is `width` bytes at
    `base + p * page_stride + i * row_stride + j * part_stride`; all in bytes."""

    base: int
    page_stride: int
    rows: int
    row_stride: int
    parts: int
    part_stride: int
    width: int

    @property
    def size(self) -> int:
        """Bytes of one page."""
        return self.rows * self.parts * self.width

    def flat(self) -> "Paged":
        """The same with as few levels as describe it: one row of one part where a page is contiguous."""
        one = self
        if one.parts > 1 and one.part_stride == one.width:
            one = one._replace(parts=1, part_stride=0, width=one.parts * one.width)
        if one.parts == 1 and one.rows > 1 and one.row_stride == one.width:
            one = one._replace(rows=1, row_stride=0, width=one.rows * one.width)
        return one


def nhd(buffer: torch.Tensor, page_size: int) -> Paged:
    """(slots, …) one row per token slot, rows contiguous inside but with any stride: MHA in NHD, MLA, indexer keys."""
    width = buffer[0].numel() * buffer.element_size()
    assert buffer[0].is_contiguous()
    stride = buffer.stride(0) * buffer.element_size()
    return Paged(buffer.data_ptr(), page_size * stride, page_size, stride, 1, 0, width).flat()


def hnd(buffer: torch.Tensor) -> Paged:
    """(pages, heads, page size, head size), the last one contiguous."""
    assert buffer.stride(3) == 1
    page, head, token, item = (buffer.stride(0), buffer.stride(1), buffer.stride(2), buffer.element_size())
    _, heads, tokens, dim = buffer.shape
    return Paged(buffer.data_ptr(), page * item, tokens, token * item, heads, head * item, dim * item).flat()


class Pack(ABC):
    """Moves tensors `first` … `first + count - 1` of the pool's T tensors for n pages.

    `pages`: (n,) int64 page numbers; `dense`: (n, count) int64 addresses of the dense side, 8-byte aligned, perhaps
    some columns of more; both on the pool's device. Returns (n, count, blocks) int64 block sums, which
    `checksum.finish` turns into tensor checksums; `blocks` is that of the largest tensor, what a smaller one does not
    reach is 0. Without `sums` there are none, which saves their memory.
    """

    def __init__(self, tensors: Sequence[Paged], device: torch.device | str) -> None:
        self._tensors = list(tensors)
        self._keys = torch.from_numpy(KEYS.view(np.int64).copy()).to(device)

    def gather(self, pages: torch.Tensor, dense: torch.Tensor, first: int = 0, *, sums: bool = True) -> torch.Tensor:
        """From the pool."""
        return self._move(pages, dense, first, to_pool=False, summed=sums)

    def scatter(self, pages: torch.Tensor, dense: torch.Tensor, first: int = 0, *, sums: bool = True) -> torch.Tensor:
        """Into the pool."""
        return self._move(pages, dense, first, to_pool=True, summed=sums)

    def _move(
        self, pages: torch.Tensor, dense: torch.Tensor, first: int, *, to_pool: bool, summed: bool
    ) -> torch.Tensor:
        n, count = dense.shape
        assert n < 2 or dense.stride(1) == 1
        blocks = max(-(-each.size // BLOCK) for each in self._tensors[first : first + count])
        shape = (n, count, blocks if summed else 0)
        sums = torch.zeros(shape, dtype=torch.int64, device=dense.device)
        if n:
            self._fill(sums, pages, dense, first, blocks, to_pool=to_pool)
        return sums

    @abstractmethod
    def _fill(
        self,
        sums: torch.Tensor,
        pages: torch.Tensor,
        dense: torch.Tensor,
        first: int,
        blocks: int,
        *,
        to_pool: bool,
    ) -> None:
        """Move the bytes and fill in their sums, if there is room for any."""


class TritonPack(Pack):
    """On a CUDA device, asynchronously on the current stream; on the CPU under TRITON_INTERPRET=1."""

    def __init__(self, tensors: Sequence[Paged], device: torch.device | str) -> None:
        super().__init__([each.flat() for each in tensors], device)
        self._word = _word(self._tensors)
        self._contiguous = all(each.rows == each.parts == 1 for each in self._tensors)
        rows = [_row(each, self._word) for each in self._tensors]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)

    def _fill(
        self,
        sums: torch.Tensor,
        pages: torch.Tensor,
        dense: torch.Tensor,
        first: int,
        blocks: int,
        *,
        to_pool: bool,
    ) -> None:
        n, count = dense.shape
        _move_block[(n * count * blocks,)](
            self._table[first:],
            pages,
            dense,
            self._keys,
            sums,
            count,
            blocks,
            dense.stride(0),
            SUMMED=sums.numel() > 0,
            TO_POOL=to_pool,
            CONTIGUOUS=self._contiguous,
            ELEMENT=_ELEMENTS[self._word],
            BYTES=self._word,
            FIELDS=_FIELDS,
            WORDS=WORDS,
        )


class TorchPack(Pack):
    """The twin, in torch operations; synchronous."""

    def __init__(self, tensors: Sequence[Paged], device: torch.device | str) -> None:
        super().__init__(tensors, device)
        self._device = torch.device(device)

    def _fill(
        self,
        sums: torch.Tensor,
        pages: torch.Tensor,
        dense: torch.Tensor,
        first: int,
        blocks: int,
        *,
        to_pool: bool,
    ) -> None:
        for i, page in enumerate(pages.tolist()):
            for t, tensor in enumerate(self._tensors[first : first + dense.shape[1]]):
                rows = self._rows(tensor, page)
                flat = self._bytes(int(dense[i, t]), tensor.size)
                source, target = (flat.view(rows.shape), rows) if to_pool else (rows, flat.view(rows.shape))
                target.copy_(source)
                if not sums.numel():
                    continue
                found = self._sum(source.contiguous().view(-1))
                sums[i, t, : len(found)] = found

    def _rows(self, tensor: Paged, page: int) -> torch.Tensor:
        """(rows, parts, width) the bytes of a page where they lie."""
        last = (tensor.rows - 1) * tensor.row_stride + (tensor.parts - 1) * tensor.part_stride + tensor.width
        span = self._bytes(tensor.base + page * tensor.page_stride, last)
        strides = (tensor.row_stride, tensor.part_stride, 1)
        return span.as_strided((tensor.rows, tensor.parts, tensor.width), strides)

    def _bytes(self, address: int, size: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(memory.view(address, size))
        return torch.as_tensor(_OnDevice(address, size), device=self._device)

    def _sum(self, data: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(-(-len(data) // BLOCK) * BLOCK, dtype=torch.uint8, device=data.device)
        padded[: len(data)] = data
        words = padded.view(torch.int64).view(-1, WORDS)
        mixed = words ^ self._keys
        return ((mixed & 0xFFFFFFFF) * ((mixed >> 32) & 0xFFFFFFFF) + words).sum(dim=1)


class _OnDevice:
    """Unowned memory that the GPU reaches, described to torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
        }


_ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def _word(tensors: Sequence[Paged]) -> int:
    """Bytes that one access may move: the largest power of two up to 8 that all places are multiples of."""
    common = 8
    for each in tensors:
        for place in (each.base, each.page_stride, each.row_stride, each.part_stride, each.width):
            common = gcd(common, place)
    return common


def _row(tensor: Paged, word: int) -> list[int]:
    """What the kernel reads of a tensor: strides in bytes, counts in elements of `word` bytes."""
    return [
        tensor.base,
        tensor.page_stride,
        tensor.row_stride,
        tensor.part_stride,
        tensor.parts,
        tensor.width // word,
        tensor.size // word,
    ]


@triton.jit  # type: ignore[untyped-decorator]
def _move_block(  # type: ignore[no-untyped-def]  # noqa: PLR0913  (Triton reads annotations: none but constexpr)
    table,
    pages,
    dense,
    keys,
    sums,
    count,
    blocks,
    dense_stride,
    SUMMED: tl.constexpr,
    TO_POOL: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BYTES: tl.constexpr,
    FIELDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program: one block of 4 KiB of one tensor of one page. A lane holds one word of the checksum, whatever the
    width of an access is. `table`: a row of `_row` for each tensor."""
    program = tl.program_id(0)
    item = program // blocks
    block = program % blocks
    row = table + (item % count) * FIELDS
    elements = tl.load(row + 6).to(tl.int32)
    per_word: tl.constexpr = 8 // BYTES
    if block * WORDS * per_word < elements:
        page = tl.load(pages + item // count)
        place = tl.load(row) + page * tl.load(row + 1)
        start = tl.load(dense + (item // count).to(tl.int64) * dense_stride + item % count)
        lane = tl.arange(0, WORDS)
        word = tl.zeros([WORDS], tl.int64)
        for part in tl.static_range(per_word):
            at = (block * WORDS + lane) * per_word + part
            if CONTIGUOUS:
                within = at.to(tl.int64) * BYTES
            else:
                width = tl.load(row + 5).to(tl.int32)
                parts = tl.load(row + 4).to(tl.int32)
                piece = at // width
                within = (piece // parts).to(tl.int64) * tl.load(row + 2)
                within += (piece % parts).to(tl.int64) * tl.load(row + 3) + (at % width).to(tl.int64) * BYTES
            pool = (place + within).to(tl.pointer_type(ELEMENT))
            flat = (start + at.to(tl.int64) * BYTES).to(tl.pointer_type(ELEMENT))
            inside = at < elements
            if TO_POOL:
                value = tl.load(flat, mask=inside, other=0)
                tl.store(pool, value, mask=inside)
            else:
                value = tl.load(pool, mask=inside, other=0)
                tl.store(flat, value, mask=inside)
            if BYTES == 8:
                word = value
            else:
                word |= (value.to(tl.int64) & ((1 << (8 * BYTES)) - 1)) << (8 * BYTES * part)
        if SUMMED:
            mixed = word ^ tl.load(keys + lane)
            product = (mixed & 0xFFFFFFFF) * ((mixed >> 32) & 0xFFFFFFFF)
            tl.store(sums + item * blocks + block, tl.sum(product + word, axis=0))
