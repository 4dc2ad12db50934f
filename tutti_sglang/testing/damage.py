"""Seeded damage to stored bytes, and the proof that a tensor checksum notices it.

`python -m tutti_sglang.testing.damage 1000000` runs a million cases; each kind of damage is one that drives, kernels
and bugs really do.
"""

import enum
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum

SECTOR = 512
BLOCK = checksum.BLOCK

Bytes = npt.NDArray[np.uint8]
TensorSums = Callable[[Bytes], npt.NDArray[np.uint64]]
"""(m, size) tensors → (m,) checksums."""


class Damage(enum.IntEnum):
    """What happened to the bytes."""

    BIT = 0  # one bit flipped
    ZEROED = 1  # a 4 KiB block never arrived
    SWAPPED = 2  # two blocks changed places
    REPEATED = 3  # a block was written twice, over its neighbour
    TORN = 4  # old bytes from some 512-byte boundary on


def inflict(data: Bytes, old: Bytes, damage: Damage, rng: np.random.Generator) -> None:
    """Damage (size,) `data` in place; `old`: (size,) what lay there before. Uniform `data` may remain as it is."""
    blocks = -(-len(data) // BLOCK)
    one, other = (int(each) for each in rng.integers(blocks, size=2))
    first, second = (slice(each * BLOCK, min((each + 1) * BLOCK, len(data))) for each in (one, other))
    shared = min(len(data[first]), len(data[second]))
    match damage:
        case Damage.BIT:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        case Damage.ZEROED:
            data[first] = 0
        case Damage.SWAPPED:
            kept = data[first][:shared].copy()
            data[first][:shared] = data[second][:shared]
            data[second][:shared] = kept
        case Damage.REPEATED:
            data[second][:shared] = data[first][:shared]
        case Damage.TORN:
            boundary = int(rng.integers(-(-len(data) // SECTOR))) * SECTOR
            data[boundary:] = old[boundary:]


def content(rng: np.random.Generator, size: int) -> Bytes:
    """(size,) bytes as a KV cache has them: noise, small floats, mostly zeros, or one value throughout."""
    match int(rng.integers(4)):
        case 0:
            return rng.integers(256, size=size, dtype=np.uint8)
        case 1:
            floats = (
                rng.standard_normal(size // 4 + 1).astype(np.float32).view(np.uint16)[1::2]
            )  # the upper halves: bf16
            return np.resize(floats, size // 2 + 1).view(np.uint8)[:size].copy()
        case 2:
            return np.where(rng.random(size) < 0.01, rng.integers(256, size=size), 0).astype(np.uint8)
        case _:
            return np.full(size, rng.integers(256), dtype=np.uint8)


def undetected(cases: int, seed: int, sums: TensorSums) -> list[str]:
    """Inflict `cases` random damages on tensors of up to 64 KiB; describe those that left the checksum as it was."""
    rng = np.random.default_rng(seed)
    missed: list[str] = []
    done = 0
    while done < cases:
        size = int(rng.integers(1, 17)) * BLOCK if rng.random() < 0.75 else int(rng.integers(1, 16 * BLOCK))
        original, old = content(rng, size), content(rng, size)
        batch = np.repeat(original[None], min(256, cases - done), axis=0)
        damages = [Damage(each) for each in rng.integers(len(Damage), size=len(batch)).tolist()]
        for row, damage in zip(batch, damages, strict=True):
            inflict(row, old, damage, rng)
        unseen = (batch != original).any(axis=1) & (sums(batch) == sums(original[None]))
        missed += [f"{damages[i].name} in {size} bytes, case {done + i} of seed {seed}" for i in np.flatnonzero(unseen)]
        done += len(batch)
    return missed


def host_sums(tensors: Bytes) -> npt.NDArray[np.uint64]:
    """`checksum.sums` of (m, size) tensors."""
    tensors = np.ascontiguousarray(tensors)
    starts = tensors.ctypes.data + np.arange(len(tensors), dtype=np.uint64) * np.uint64(tensors.shape[1])
    return checksum.sums(starts[:, None], [tensors.shape[1]])[:, 0]


def main(arguments: list[str]) -> int:
    """`[cases [seed]]`: 1 when a damage went unnoticed."""
    cases, seed = [*map(int, arguments), *(1_000_000, 0)[len(arguments) :]]
    missed = undetected(cases, seed, host_sums)
    sys.stdout.write("\n".join([*missed, f"{len(missed)} of {cases} damages went unnoticed (seed {seed})\n"]))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
