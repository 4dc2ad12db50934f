"""The direct path on SGLang's command line: `"path": "direct"` behind the host path's flags starts the external linker.

What only a host tier has (a write policy, a prefetch policy, host memory …) is refused by name.
"""

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution

from tutti_sglang.config import Config, load_config
from tutti_sglang.errors import UnsupportedError

logger = logging.getLogger(__name__)

LINKER_CLASS_NAME = "TuttiLinker"
MEANINGLESS = (
    "hicache_write_policy",
    "hicache_storage_prefetch_policy",
    "hicache_host_memory_mode",
    "hicache_host_memory_fraction",
    "hicache_ratio",
    "hicache_size",
    "hicache_mem_layout",
    "hicache_io_backend",
    "disaggregation_decode_enable_offload_kvcache",
)
"""Flags of a host tier."""

Given = Callable[[str], bool]


def uses_linker(cfg: Any, name: str) -> bool:
    """Whether the external linker is ours. `name`: our choice of --unified-cache-external-linker-backend."""
    if not cfg.enable_unified_cache_external_linker:
        return False
    backend, config = cfg.unified_cache_external_linker_backend, cfg.unified_cache_external_linker_config
    ours = isinstance(config, dict) and config.get("linker") == LINKER_CLASS_NAME
    return backend == name or (backend == "dynamic" and ours)


def linker_settings(cfg: Any) -> Config:
    """The settings of our linker. ConfigError."""
    config = dict(cfg.unified_cache_external_linker_config or {})
    if cfg.unified_cache_external_linker_backend == "dynamic":
        config = dict(config.get("linker_extra_config") or {})
    settings = load_config({"path": "direct", **config}).config
    if settings.path != "direct":
        raise UnsupportedError(
            f'"path": "{settings.path}" has no external linker',
            'Leave it out, or use --enable-hierarchical-cache --hicache-storage-backend tutti for "path": "host"',
        )
    return settings


def turn_direct(server_args: Any, cfg: Any, name: str, extra: dict[str, Any], is_given: Given) -> None:
    """Replace the host path's flags by those of the linker."""
    if cfg.hicache_storage_backend != name:
        raise UnsupportedError(
            '"path": "direct" is not a HiCache backend',
            f"Use --hicache-storage-backend {name}, or --enable-unified-cache-external-linker "
            "--unified-cache-external-linker-backend dynamic",
        )
    refuse_meaningless(is_given)
    declare_resolution(
        server_args,
        name,
        enable_hierarchical_cache=False,
        hicache_storage_backend=None,
        hicache_storage_backend_extra_config=None,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend=name,
        unified_cache_external_linker_config=extra,
    )
    logger.info(
        'tutti: "path": "direct": --enable-unified-cache-external-linker instead of --enable-hierarchical-cache'
    )


def refuse_meaningless(is_given: Given) -> None:
    """UnsupportedError that names the flags."""
    flags = [f"--{flag.replace('_', '-')}" for flag in MEANINGLESS if is_given(flag)]
    if flags:
        raise UnsupportedError(
            f"{', '.join(flags)}: no meaning on the direct path, which has no host tier",
            'Leave them out, or set "path": "host" in the extra config',
        )
