"""An SGLang plugin of the tests: notes a digest of every page that goes to the storage backend or comes back from it.

The bytes are those that SGLang's own `get_data_page` shows of its host pool, so they pass through none of our code.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "TUTTI_TEST_RECORD"
CLASS = "tutti_sglang.integration.hicache.TuttiHiCacheStorage"


def register() -> None:
    """Entry point: in scheduler processes, look at each batch after it was moved."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for call in ("batch_set_v1", "batch_get_v1"):
        HookRegistry.register(f"{CLASS}.{call}", _note(call), HookType.AFTER)


def _note(call: str) -> Callable[..., None]:
    def note(result: list[bool], backend: Any, keys: list[str], host_indices: Any, *_: Any) -> None:
        import torch
        import xxhash

        pool = backend.mem_pool_host
        with Path(os.environ[VARIABLE]).open("a") as file:
            for place, (key, moved) in enumerate(zip(keys, result, strict=True)):
                if moved:
                    page = pool.get_data_page(int(host_indices[place * pool.page_size])).view(torch.uint8)
                    digest = xxhash.xxh3_128_hexdigest(page.numpy().tobytes())
                    file.write(json.dumps([call, os.getpid(), key, digest]) + "\n")

    return note


def recorded(file: Path, call: str) -> dict[str, set[str]]:
    """For each key the digests of its pages, one for each rank that holds another shard."""
    pages: dict[str, set[str]] = defaultdict(set)
    for line in file.read_text().splitlines():
        its_call, _, key, digest = json.loads(line)
        if its_call == call:
            pages[key].add(digest)
    return pages
