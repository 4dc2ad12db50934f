"""How much of a prefix can be restored: SGLang's hit policies on arrays (mem_cache/hicache_storage.py:288)."""

import numpy as np
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from tutti_sglang.integration.stored import Found


def leading(found: Found) -> int:
    """Pages before the first one that is missing."""
    return len(found) if found.all() else int(found.argmin())


def allowed(found: Found, transfer: PoolTransfer) -> Found:
    """[p - 1]: whether this pool lets p pages be restored. `found`: which of its pages are there."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return np.arange(len(found)) < leading(found)
    # TRAILING_PAGES: the last `window` pages must be there, or all where there are fewer.
    window = max(1, len(transfer.keys or ()))
    missing = np.concatenate([[0], np.cumsum(~found)])
    ends = np.arange(1, len(found) + 1)
    return np.asarray(missing[ends] == missing[np.maximum(0, ends - window)])
