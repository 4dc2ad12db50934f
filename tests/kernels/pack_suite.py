"""What `kernels/pack.py` promises, for any mover on any device: run under TRITON_INTERPRET=1 by test_pack.py, on a GPU
by tests/gpu/test_pack.py. Needs no more than torch and the source tree."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tutti_sglang import checksum
from tutti_sglang.checksum import BLOCK
from tutti_sglang.kernels.pack import Pack, Paged, TorchPack
from tutti_sglang.units import align_up

Make = Callable[[Sequence[Paged], torch.device], Pack]


class Pool(NamedTuple):
    """Buffers with gaps, and how the pages lie in them."""

    buffers: list[torch.Tensor]
    tensors: list[Paged]
    pages: int


def pool_of(shapes: list[tuple[Paged, int]], seed: int, device: torch.device) -> Pool:
    """Random bytes in the shapes drawn."""
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device) for _, size in shapes]
    tensors = [shape._replace(base=buffer.data_ptr()) for (shape, _), buffer in zip(shapes, buffers, strict=True)]
    return Pool(buffers, tensors, shapes[0][1] // shapes[0][0].page_stride)


def dense_rows(tensors: Sequence[Paged], n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense memory for n pages, and the (n, T) addresses in it."""
    strides = np.array([align_up(each.size, BLOCK) for each in tensors])
    data = torch.zeros((n, int(strides.sum())), dtype=torch.uint8, device=device)
    places = data.data_ptr() + np.arange(n)[:, None] * data.stride(0) + (np.cumsum(strides) - strides)
    return data, torch.from_numpy(places.astype(np.int64)).to(device)


def check_gather(make: Make, shapes: list[tuple[Paged, int]], seed: int, device: torch.device) -> None:
    """Bytes, block sums and tensor checksums are those of the twin and of the reference."""
    pool = pool_of(shapes, seed, device)
    pages = torch.from_numpy(np.random.default_rng(seed).permutation(pool.pages)[:4].copy()).to(device)
    data, dense = dense_rows(pool.tensors, len(pages), device)
    expected, places = dense_rows(pool.tensors, len(pages), device)
    sums = make(pool.tensors, device).gather(pages, dense)
    assert torch.equal(sums, TorchPack(pool.tensors, device).gather(pages, places))
    assert torch.equal(data, expected)
    if device.type == "cpu":
        rows = dense.numpy().view(np.uint64)
        sizes = [each.size for each in pool.tensors]
        finished = [
            checksum.finish(sums[:, t, : -(-size // BLOCK)].numpy().view(np.uint64), size)
            for t, size in enumerate(sizes)
        ]
        assert (np.column_stack(finished) == checksum.sums(rows, sizes)).all()


def check_scatter(make: Make, shapes: list[tuple[Paged, int]], seed: int, device: torch.device) -> None:
    """Back in the pool lie the same bytes, and nothing beside them changed; of a part of the tensors too."""
    pool = pool_of(shapes, seed, device)
    pages = torch.from_numpy(np.random.default_rng(seed).permutation(pool.pages)[:4].copy()).to(device)
    _, dense = dense_rows(pool.tensors, len(pages), device)
    pack = make(pool.tensors, device)
    sums = pack.gather(pages, dense)
    before = [buffer.clone() for buffer in pool.buffers]
    twin = TorchPack(pool.tensors, device)
    for first in range(len(pool.tensors)):
        zeros, places = dense_rows(pool.tensors, len(pages), device)
        twin.scatter(pages, places[:, first : first + 1].contiguous(), first)
        back = pack.scatter(pages, dense[:, first : first + 1].contiguous(), first)
        assert torch.equal(back[:, 0], sums[:, first, : back.shape[2]])
        assert not zeros.any()
    assert all(torch.equal(a, b) for a, b in zip(pool.buffers, before, strict=True))
