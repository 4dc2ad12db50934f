"""Checksums of tensors and objects: one function with one value in numpy (here, the reference), C++ and Triton.

A block is 4 KiB, 512 little-endian words w; its sum is Σ lo32(w ^ k) · hi32(w ^ k) + w mod 2⁶⁴, with the 512 words k
of KEYS (as XXH3 accumulates; the + w keeps what a zero half would lose). The last block of a tensor is padded with
zeros. A tensor's checksum is XXH3-64 of its block sums and, after them, its length in bytes, all u64 little-endian: it
depends on the position of each block, and a GPU can compute the blocks in parallel. The root of an object is XXH3-64 of
its row of tensor checksums.
"""

import ctypes

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from tutti_sglang.kernels import native
from tutti_sglang.memory import Addresses, check_rows, windows

BLOCK = 4096
WORDS = BLOCK // 8

_PIECE = 64 << 10  # bytes gathered as one: longer rows are cut
_CHUNK = 256 << 10  # bytes summed at a time: two scratch arrays of this size stay in the L2 cache
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Sums = npt.NDArray[np.uint64]


def _splitmix64(seed: int, count: int) -> Sums:
    """The first `count` numbers of the SplitMix64 generator (Steele, Lea, Flood 2014)."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


KEYS: Sums = _splitmix64(0x5455545449, WORDS)  # the seed spells TUTTI
KEYS.flags.writeable = False


def copy_and_sum(dst: Addresses, src: Addresses, sizes: npt.ArrayLike) -> Sums:
    """Copy as `memory.copy_rows` does and return the (n, T) tensor checksums of the very bytes that were copied."""
    dst, src, row_sizes = check_rows(dst, src, sizes)
    library = native.library()
    if library is None:
        return _sum_rows(dst, src, row_sizes)
    out = np.empty(src.shape, dtype=np.uint64)
    library.tutti_copy_and_sum(dst.ctypes, src.ctypes, row_sizes.ctypes, *map(ctypes.c_size_t, src.shape), out.ctypes)
    return out


def sums(rows: Addresses, sizes: npt.ArrayLike) -> Sums:
    """(n, T) tensor checksums of `sizes[t]` bytes at `rows[i, t]`; `sizes`: (T,) > 0, in bytes."""
    rows, row_sizes = check_rows(rows, sizes)
    library = native.library()
    if library is None:
        return _sum_rows(None, rows, row_sizes)
    out = np.empty(rows.shape, dtype=np.uint64)
    library.tutti_sums(rows.ctypes, row_sizes.ctypes, *map(ctypes.c_size_t, rows.shape), out.ctypes)
    return out


def roots(tensor_sums: Sums) -> Sums:
    """(n, T) tensor checksums → (n,) roots."""
    table = np.ascontiguousarray(tensor_sums, dtype=np.uint64)
    library = native.library()
    if library is None:
        return _hash_rows(table)
    out = np.empty(len(table), dtype=np.uint64)
    library.tutti_roots(table.ctypes, *map(ctypes.c_size_t, table.shape), out.ctypes)
    return out


def finish(block_sums: Sums, size: int) -> Sums:
    """(m, blocks) block sums of m tensors of `size` bytes → (m,) tensor checksums."""
    assert block_sums.shape[1] == -(-size // BLOCK)
    return _hash_rows(np.column_stack([block_sums, np.full(len(block_sums), size, dtype=np.uint64)]))


def _hash_rows(table: Sums) -> Sums:
    width = table.shape[1] * 8
    data = memoryview(table.astype("<u8", copy=False).tobytes())
    return np.array([xxh3_64_intdigest(data[at : at + width]) for at in range(0, len(data), width)], dtype=np.uint64)


def _sum_rows(dst: Addresses | None, src: Addresses, sizes: npt.NDArray[np.uint64]) -> Sums:
    """The twin of the native functions: `sums`, and the copy when there is a destination."""
    out = np.empty(src.shape, dtype=np.uint64)
    if not len(src):
        return out
    for size in np.unique(sizes).tolist():
        columns = sizes == size
        sources = src[:, columns].ravel()
        targets = None if dst is None else dst[:, columns].ravel()
        pieces, rest = divmod(size, _PIECE)
        parts = []
        if pieces:
            cuts = np.arange(pieces, dtype=np.uint64) * np.uint64(_PIECE)
            whole = _sum_pieces(_cut(targets, cuts), (sources[:, None] + cuts).ravel(), _PIECE)
            parts.append(whole.reshape(len(sources), -1))
        if rest:
            tail = np.array([pieces * _PIECE], dtype=np.uint64)
            parts.append(_sum_pieces(_cut(targets, tail), sources + tail, rest))
        out[:, columns] = finish(np.concatenate(parts, axis=1), size).reshape(len(src), -1)
    return out


def _cut(addresses: Addresses | None, offsets: Addresses) -> Addresses | None:
    return None if addresses is None else (addresses[:, None] + offsets).ravel()


def _sum_pieces(dst: Addresses | None, src: Addresses, size: int) -> Sums:
    """(m, blocks) block sums of `size` ≤ _PIECE bytes at (m,) addresses; `dst` gets the very bytes that were summed."""
    blocks = -(-size // BLOCK)
    step = min(len(src), max(1, _CHUNK // (blocks * BLOCK)))
    padded = np.zeros((step, blocks * BLOCK), dtype=np.uint8)
    scratch = np.empty((2, step * blocks, WORDS), dtype=np.uint64)
    out = np.empty((len(src), blocks), dtype=np.uint64)
    out_of, source = windows(src, size)
    into, target = windows(src if dst is None else dst, size)
    for start in range(0, len(src), step):
        rows = out_of[source[start : start + step]]
        if dst is not None:
            into[target[start : start + step]] = rows
        count = len(rows)
        if size % BLOCK:
            padded[:count, :size] = rows.view(np.uint8).reshape(count, size)
            words = padded[:count].view("<u8")
        else:
            words = rows.view("<u8")
        out[start : start + count] = _sum_blocks(words.reshape(-1, WORDS), scratch).reshape(count, blocks)
    return out


def _sum_blocks(words: Sums, scratch: Sums) -> Sums:
    """(m, 512) words → (m,) block sums; `scratch`: (2, ≥ m, 512)."""
    low, high = scratch[0, : len(words)], scratch[1, : len(words)]
    np.bitwise_xor(words, KEYS, out=low)
    np.right_shift(low, _SHIFT, out=high)
    np.bitwise_and(low, _LOW, out=low)
    np.multiply(low, high, out=low)
    np.add(low, words, out=low)
    return np.asarray(low.sum(axis=1))
