"""How a server is started for each cache that is compared: the flags and variables that its own documentation names."""

import json
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

PAGES = ("--page-size", "64", "--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct")
"""What the tier chooses for itself; the others get the same."""
HOST = ("--without-tier", "--enable-hierarchical-cache", *PAGES)


class Launch(NamedTuple):
    """Arguments of tutti_sglang.integration.launch, and variables of the environment."""

    arguments: tuple[str, ...]
    environ: Mapping[str, str] = MappingProxyType({})


def _direct(store: Path) -> Launch:
    extra = json.dumps({"path": "direct", "storage_dirs": [str(store)], "max_size": "4GiB"})
    return Launch(("--store", str(store), "--hicache-storage-backend-extra-config", extra))


def _file(store: Path) -> Launch:
    variables = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
    return Launch((*HOST, "--hicache-storage-backend", "file"), variables)


def _nixl(store: Path) -> Launch:
    variables = {
        "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(store),
        "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN": "POSIX",
    }
    return Launch((*HOST, "--hicache-storage-backend", "nixl"), variables)


CONTENDERS: dict[str, Callable[[Path], Launch]] = {
    "none": lambda store: Launch(("--without-tier", "--disable-radix-cache")),
    "without": lambda store: Launch(("--without-tier", "--page-size", "64")),
    "host": lambda store: Launch(HOST),
    "file": _file,
    "nixl": _nixl,
    "with": lambda store: Launch(("--store", str(store))),
    "direct": _direct,
}
NAMES = {
    "none": "no cache",
    "without": "device memory alone",
    "host": "host memory",
    "file": "`file`",
    "nixl": "`nixl`",
    "with": "tutti, host path",
    "direct": "tutti, direct path",
}


def launch(contender: str, store: Path) -> Launch:
    """How to start it over an empty or used directory."""
    store.mkdir(parents=True, exist_ok=True)
    return CONTENDERS[contender](store)


def refused(contender: str) -> str:
    """Why it cannot take part here; empty when it can. A server finds packages as this process does."""
    if contender == "nixl" and not find_spec("nixl"):
        return "nixl is not installed: pip install --no-deps --target DIR nixl-cu13 nixl, and PYTHONPATH=DIR"
    return ""


def environment(found: Launch) -> dict[str, str]:
    """All variables of such a server."""
    return {**os.environ, **found.environ}
