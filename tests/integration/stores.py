"""Small stores for servers of tests, and what is in them as another process sees it."""

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

from tests.integration.server import Reply

STORE_SECONDS = 60.0


def extra(store: Path, **more: Any) -> dict[str, Any]:
    """Settings of a small store."""
    sizes = {"max_size": "512MiB", "segment_size": "16MiB", "min_free_space": "64MiB", "staging_size": "64MiB"}
    return {"storage_dirs": [str(store)], **sizes, **more}


def objects(store: Path) -> int:
    """Objects in the index."""
    with contextlib.closing(sqlite3.connect(f"file:{store / 'index.db'}?mode=ro", uri=True)) as index:
        return int(index.execute("SELECT count(*) FROM objects").fetchone()[0])


def wait_for_objects(store: Path, count: int) -> None:
    """Until so many are there; SGLang backs up behind the answer."""
    deadline = time.monotonic() + STORE_SECONDS
    while objects(store) < count:
        assert time.monotonic() < deadline, f"{objects(store)} objects after {STORE_SECONDS} s, not {count}"
        time.sleep(0.2)


def from_storage(again: Reply, first: Reply, *, page_size: int = 64) -> None:
    """Asserts that `again` is the same answer as `first`, and its whole pages came from the storage."""
    assert again.tokens == first.tokens
    assert again.storage >= (first.prompt_tokens - 1) // page_size * page_size - page_size
    assert again.storage > 0
    assert again.host == again.device == 0
