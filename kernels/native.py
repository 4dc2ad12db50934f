"""Finds the native host library; without it, pure Python does the same work more slowly."""

import ctypes
from functools import cache
from pathlib import Path

_PATTERN = "_host*.so"


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    found = sorted(Path(__file__).parent.glob(_PATTERN))
    if not found:
        return None, "the native library was not built (no C++20 compiler at installation)"
    try:
        return ctypes.CDLL(str(found[0])), ""
    except OSError as error:
        return None, f"the native library cannot be loaded: {error}"


def library() -> ctypes.CDLL | None:
    """The library, loaded once per process; None when there is none: `unavailable_reason()` says why."""
    return _load()[0]


def unavailable_reason() -> str:
    """Why `library()` is None; empty when it is not."""
    return _load()[1]
