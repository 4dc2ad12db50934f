"""Stores on a real file system: ext4, so that O_DIRECT and fallocate behave as in service."""

import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.index_kit import GROUP, NAMESPACE, SLOTS, open_index
from tutti_sglang.geometry import Stripe
from tutti_sglang.store.index import Index


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on a disk. Not pytest's tmp_path, which may be a tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="tutti-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """A new one, as in service: with its table in memory."""
    opened = open_index(tmp_path)
    opened.mirror(math.inf)
    yield opened
    opened.close()


@pytest.fixture
def space(index: Index) -> int:
    """A namespace of it with one segment."""
    number = index.namespace_id(NAMESPACE)
    index.add_segment(number, (0, 1), GROUP, SLOTS, Stripe.TENSOR)
    return number
