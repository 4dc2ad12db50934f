"""Stores, backends and host pools for what went wrong elsewhere: real files, the real class, SGLang's own pools."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import disk

__all__ = ["disk"]


@pytest.fixture
def opened(disk: Path) -> Iterator[Callable[..., Any]]:
    """Backends on one store, as SGLang's factory makes them; closed at the end."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    from tests.integration.backends import Backends

    backends = Backends(disk / "store")
    yield backends.open
    backends.close()
