"""How much of a prefix can be restored: SGLang's hit policies on arrays (mem_cache/hicache_storage.py:288)."""

from collections.abc import Callable, Iterable

import numpy as np
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tutti_sglang.integration.stored import Found


def leading(found: Found) -> int:
    """Pages before the first one that is missing."""
    return len(found) if found.all() else int(found.argmin())


def last(found: Found) -> int:
    """Pages up to the last one that is there."""
    return int(np.flatnonzero(found)[-1]) + 1 if found.any() else 0


def allowed(found: Found, transfer: PoolTransfer) -> Found:
    """[p - 1]: whether this pool lets p pages be restored. `found`: which of its pages are there."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return np.arange(len(found)) < leading(found)
    # TRAILING_PAGES: the last `window` pages must be there, or all where there are fewer.
    window = max(1, len(transfer.keys or ()))
    missing = np.concatenate([[0], np.cumsum(~found)])
    ends = np.arange(1, len(found) + 1)
    return np.asarray(missing[ends] == missing[np.maximum(0, ends - window)])


def restorable(
    found: Callable[[str], Found], transfers: Iterable[PoolTransfer]
) -> tuple[list[int], dict[PoolName, int]]:
    """All lengths, in pages, at which every pool's policy holds, and the longest for each pool alone. `found`: which of
    the prefix's pages are there in a pool; one that is not kept lets none be restored. `transfers`: of the side
    pools."""
    length = leading(found(PoolName.KV))
    hits = {PoolName.KV: length} if length else {}
    good = np.ones(length, np.bool_)
    for transfer in transfers:
        permits = allowed(found(transfer.name)[:length], transfer)
        if longest := last(permits):
            hits[transfer.name] = longest
        good &= permits
    return (np.flatnonzero(good) + 1).tolist(), hits
