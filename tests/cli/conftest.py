"""A directory on a real disk."""

from tests.store.conftest import disk

__all__ = ["disk"]
