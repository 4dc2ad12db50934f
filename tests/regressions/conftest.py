"""Stores, backends and host pools for what went wrong elsewhere: real files, the real class, SGLang's own pools."""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on a disk that knows O_DIRECT; a tmpfs accepts what a disk refuses."""
    path = Path(tempfile.mkdtemp(prefix="tutti-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def opened(disk: Path) -> Iterator[Callable[..., Any]]:
    """Backends on one store, as SGLang's factory makes them; closed at the end."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    from tests.integration.backends import Backends

    backends = Backends(disk / "store")
    yield backends.open
    backends.close()
