"""SGLang's command line: the choice `tutti`, its settings checked before anything starts, defaults that suit a disk.

Adjusted only where the user named nothing. Each step hooks the point of SGLang's own pipeline (arg_groups/pipeline.py)
where its value is decided: a page size declared earlier would stop models that can only serve pages of one token.
"""

import argparse
import contextlib
import functools
import logging
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from sglang.srt.arg_groups.arg_utils import _unwrap_annotated
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs

from tutti_sglang.config import load_config, read_extra_config
from tutti_sglang.errors import TuttiError
from tutti_sglang.integration import precheck
from tutti_sglang.integration.direct import flags as direct

logger = logging.getLogger(__name__)

NAME = "tutti"
CLASS_NAME = "TuttiHiCacheStorage"
FLAGS = ("hicache_storage_backend", "unified_cache_external_linker_backend")
PAGE_SIZE = 64
SMALL_PAGE = 16
LAYOUT = {"hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct"}

_PAGE_TREE_BACKENDS = ("flashinfer", "fa3", "triton")
"""Attention backends that speculate with trees over pages of more than one token (arg_groups/speculative_hook.py)."""

Step = Callable[[Any], None]


def install() -> None:
    """Offer the choice and hook the resolution of the flags."""
    try:
        _offer_choice()
    except (AttributeError, KeyError, TypeError):
        logger.warning("tutti: SGLang's flags look different here; offering the choice in the parser instead")
    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", _offer_in_parser, HookType.AFTER)
    register_resolution_hook("handle_hicache_ratio_default")(check_settings)
    register_resolution_hook("handle_mxfp8_kv_cache_compatibility")(choose_page_size)
    register_resolution_hook("handle_hicache")(choose_layout_and_threshold)


def _offer_choice() -> None:
    hints = typing.get_type_hints(ServerArgs, include_extras=True)
    for flag in FLAGS:
        _, argument = _unwrap_annotated(hints[flag])
        if NAME not in argument.choices:
            argument.choices.append(NAME)


def _offer_in_parser(_: Any, parser: argparse.ArgumentParser) -> None:
    options = {f"--{flag.replace('_', '-')}" for flag in FLAGS}
    for action in parser._actions:
        if options & set(action.option_strings) and NAME not in (action.choices or [NAME]):
            action.choices = [*(action.choices or ()), NAME]


def check_settings(server_args: Any, previous: Step) -> None:
    """The first step that SGLang resolves: a setting that cannot work stops the launch here."""
    cfg = resolving_view(server_args)
    given = functools.partial(_is_given, server_args, cfg)
    with _plainly(server_args):
        if _is_hicache(cfg):
            extra = read_extra_config(cfg.hicache_storage_backend_extra_config)
            config = load_config(extra).config
            if config.path == "direct":
                direct.turn_direct(server_args, cfg, NAME, extra, given)
                precheck.open_once(config)
            elif cfg.enable_hierarchical_cache or cfg.disaggregation_decode_enable_offload_kvcache:
                precheck.open_once(config)
            else:
                logger.warning("tutti: --hicache-storage-backend does nothing without --enable-hierarchical-cache")
        elif direct.uses_linker(cfg, NAME):
            config = direct.linker_settings(cfg)
            direct.refuse_meaningless(given)
            precheck.open_once(config)
    previous(server_args)


def choose_page_size(server_args: Any, previous: Step) -> None:
    """The last step before SGLang settles on one token per page; model and attention backend have had their say."""
    previous(server_args)
    cfg = resolving_view(server_args)
    if not (_is_hicache(cfg) or direct.uses_linker(cfg, NAME)):
        return
    reason = _why_single_tokens(cfg)
    if cfg.page_size is None and not reason:
        declare_resolution(server_args, NAME, page_size=PAGE_SIZE)
        logger.info("tutti: page size %d (--page-size was not given)", PAGE_SIZE)
    elif (cfg.page_size or 1) < SMALL_PAGE:
        logger.warning("tutti: %s", small_page_warning(cfg.page_size or 1, reason))


def _why_single_tokens(cfg: Any) -> str:
    """Why this model needs pages of one token; empty when it does not."""
    if cfg.uses_mamba_radix_cache and cfg.mamba_radix_cache_strategy == "no_buffer":
        return "--mamba-radix-cache-strategy no_buffer allows no other"
    if (
        cfg.speculative_algorithm is not None
        and cfg.speculative_eagle_topk != 1
        and cfg.attention_backend not in _PAGE_TREE_BACKENDS
    ):
        return "speculation with --speculative-eagle-topk above 1 allows no other with this attention backend"
    return ""


def small_page_warning(page_size: int, reason: str = "") -> str:
    """What a page of a few tokens costs on a disk."""
    advice = f"it stays, since {reason}" if reason else f"use --page-size {PAGE_SIZE}"
    return (
        f"with --page-size {page_size} each object holds {page_size} token(s) and each tensor of it fills a block of "
        f"4KiB on disk: tens of times more I/O and space than with {PAGE_SIZE}; {advice}"
    )


def choose_layout_and_threshold(server_args: Any, previous: Step) -> None:
    """Before SGLang makes layout and I/O backend agree; the page size is known by now."""
    cfg = resolving_view(server_args)
    if _is_hicache(cfg):
        if not any(_is_given(server_args, cfg, flag) for flag in LAYOUT):
            declare_resolution(server_args, NAME, **LAYOUT)
            logger.info("tutti: %s (neither was given)", ", ".join(f"{k}={v}" for k, v in LAYOUT.items()))
        extra = read_extra_config(cfg.hicache_storage_backend_extra_config)
        if "prefetch_threshold" not in extra and cfg.page_size:
            extra["prefetch_threshold"] = cfg.page_size
            text = msgspec.json.encode(extra).decode()
            declare_resolution(server_args, NAME, hicache_storage_backend_extra_config=text)
            logger.info("tutti: prefetch_threshold=%d tokens, a page (it was not given)", cfg.page_size)
    previous(server_args)


def _is_given(server_args: Any, cfg: Any, flag: str) -> bool:
    default = next(field.default for field in msgspec.structs.fields(ServerArgs) if field.name == flag)
    command = (server_args.launch_command or "").replace("-", "_")
    return getattr(cfg, flag) != default or flag in command


def _is_hicache(cfg: Any) -> bool:
    if cfg.hicache_storage_backend == NAME:
        return True
    text = cfg.hicache_storage_backend_extra_config or ""
    if cfg.hicache_storage_backend != "dynamic" or not text:
        return False
    if text.startswith("@"):
        with contextlib.suppress(OSError):
            text = Path(text[1:]).read_text()
    return CLASS_NAME in text


@contextlib.contextmanager
def _plainly(server_args: Any) -> Iterator[None]:
    """From a command line, end with the message alone; a Python caller (sglang.Engine) gets the exception."""
    try:
        yield
    except TuttiError as error:
        command = server_args.launch_command
        if command is None or command.startswith("Engine("):
            raise
        raise SystemExit(f"tutti: {error}") from None
