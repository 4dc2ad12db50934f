"""Which IOCTX of a batch are moved together: pure arithmetic on numpy arrays."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import Batch, Operation

IOV_MAX = 1024
"""Pieces of memory that one system call takes (limits.h)."""

_LONGEST = np.iinfo(np.int32).max  # a result tells bytes as int32


class Transfer(NamedTuple):
    """IOCTX [first, last) of a batch, which follow one another on `drive` within `segment`."""

    first: int
    last: int
    drive: int
    segment: int


def malformed(batch: Batch, segment_size: int) -> npt.NDArray[np.bool_]:
    """(n,) which IOCTX cannot be: empty, too long for a result, across the end of a segment, or of no operation."""
    length = batch["length"].astype(np.uint64)
    beyond = batch["offset"] % np.uint64(segment_size) + length > segment_size
    return np.asarray((length == 0) | (length > _LONGEST) | beyond | (batch["operation"] > max(Operation)))


def coalesce(batch: Batch, bad: npt.NDArray[np.bool_], segment_size: int, max_io: int) -> list[Transfer]:
    """Join IOCTX that follow one another in the batch and on the drive, up to `max_io` bytes and IOV_MAX pieces.

    A longer IOCTX stands alone; those that are `bad` ((n,)) are left out.
    """
    count = len(batch)
    if not count:
        return []
    offset, length = batch["offset"], batch["length"].astype(np.uint64)
    segment = offset // np.uint64(segment_size)
    follows = (offset[1:] == offset[:-1] + length[:-1]) & ~(bad[1:] | bad[:-1])
    for same in (batch["drive"], batch["operation"], segment):
        follows &= same[1:] == same[:-1]
    place = np.arange(count)
    breaks = np.append(np.flatnonzero(~follows) + 1, count)
    run_ends = breaks[np.searchsorted(breaks, place, side="right")]
    ends = np.cumsum(length)
    fitting = np.searchsorted(ends, ends - length + np.uint64(max_io), side="right")
    lasts = np.maximum(np.minimum(np.minimum(fitting, run_ends), place + IOV_MAX), place + 1)
    firsts = _chain(lasts)
    firsts = firsts[~bad[firsts]]
    return [
        Transfer(*each)
        for each in zip(
            firsts.tolist(),
            lasts[firsts].tolist(),
            batch["drive"][firsts].tolist(),
            segment[firsts].tolist(),
            strict=True,
        )
    ]


def _chain(lasts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The places reached from 0 by going from each to its `lasts`: a step per transfer, not per IOCTX."""
    reached, at = [], 0
    while at < len(lasts):
        reached.append(at)
        at = int(lasts[at])
    return np.array(reached)
