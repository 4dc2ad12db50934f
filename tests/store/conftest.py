"""Stores on a real file system: ext4, so that O_DIRECT and fallocate behave as in service."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on a disk. Not pytest's tmp_path, which may be a tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="tutti-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
