"""Finds the native host library; without it, pure Python does the same work more slowly."""

import ctypes
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

ABI = 11
"""`kAbi` of kernels/host/abi.hpp: a library built from other sources than these is not used."""

_PATTERN = "_host*.so"

_Signature = tuple[Any, tuple[Any, ...]]

_LONG: dict[str, _Signature] = {
    "tutti_copy_rows": (None, (c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)),
    "tutti_copy_and_sum": (None, (c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_void_p)),
    "tutti_sums": (None, (c_void_p, c_void_p, c_size_t, c_size_t, c_void_p)),
    "tutti_engine_open": (c_void_p, (c_void_p,)),
    "tutti_engine_attach": (c_int, (c_void_p, c_uint16, c_uint32, c_int)),
    "tutti_engine_detach": (c_int, (c_void_p, c_uint16, c_uint32, c_int64)),
    "tutti_engine_wait": (c_int, (c_void_p, c_void_p, c_int64, c_void_p)),
    "tutti_engine_read": (None, (c_void_p, c_void_p, c_void_p)),
    "tutti_engine_launch": (c_void_p, (c_void_p, c_void_p, c_void_p, c_uint, c_uint, c_int64)),
    "tutti_engine_land": (c_int, (c_void_p, c_void_p, c_int64, c_void_p)),
    "tutti_plan": (c_uint64, (c_void_p, c_void_p, c_uint64, c_uint, c_uint, c_void_p)),
    "tutti_engine_close": (c_int, (c_void_p, c_int64)),
}
"""Functions that move bytes or wait: the GIL is free meanwhile."""

_SHORT: dict[str, _Signature] = {
    "tutti_roots": (None, (c_void_p, c_size_t, c_size_t, c_void_p)),
    "tutti_xxh3": (c_uint64, (c_void_p, c_size_t)),
    "tutti_pages": (c_int, (c_void_p, c_size_t, c_int64, c_int64, c_void_p)),
    "tutti_page_rows": (None, (c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p)),
    "tutti_marks": (None, (c_uint32, c_char_p, c_size_t, c_void_p)),
    "tutti_find": (None, (c_void_p, c_void_p, c_size_t, c_int64, c_void_p)),
    "tutti_uring_probe": (c_int, ()),
    "tutti_engine_refused": (c_int, (c_void_p,)),
    "tutti_engine_registered": (c_uint64, (c_void_p,)),
    "tutti_engine_submit": (c_void_p, (c_void_p, c_void_p, c_size_t, c_uint, c_int64)),
    "tutti_engine_poll": (c_int, (c_void_p, c_void_p, c_void_p)),
    "tutti_engine_cancel": (None, (c_void_p, c_void_p)),
    "tutti_engine_counters": (None, (c_void_p, c_void_p)),
    "tutti_engine_free": (None, (c_void_p,)),
    "tutti_ticket_done": (c_int, (c_void_p,)),
    "tutti_ticket_release": (None, (c_void_p,)),
}
"""Functions of a few µs. They keep the GIL: beside a busy Python thread, who gives it away waits up to a switch
interval (5 ms) to get it back."""


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    found = sorted(Path(__file__).parent.glob(_PATTERN), key=lambda path: path.stat().st_mtime)
    if not found:
        return None, "the native library was not built (no C++20 compiler at installation)"
    try:
        library, holding = ctypes.CDLL(str(found[-1])), ctypes.PyDLL(str(found[-1]))
        library.tutti_abi.restype = c_uint32
        if (abi := library.tutti_abi()) != ABI:
            return None, f"{found[-1]} is of another version ({abi}, not {ABI}): install the package again"
        for name, signature in _LONG.items():
            function = getattr(library, name)
            function.restype, function.argtypes = signature
        for name, signature in _SHORT.items():
            function = getattr(holding, name)
            function.restype, function.argtypes = signature
            setattr(library, name, function)
    except (OSError, AttributeError) as error:
        return None, f"the native library cannot be loaded: {error}"
    return library, ""


def library() -> ctypes.CDLL | None:
    """The library, loaded once per process; None when there is none: `unavailable_reason()` says why."""
    return _load()[0]


def unavailable_reason() -> str:
    """Why `library()` is None; empty when it is not."""
    return _load()[1]
