"""Hooks for the linker: its name, its hits counted as storage, and SGLang's waiting queue.

What a request needs is read when it arrives, and it is admitted when it is there. SGLang does the same for the host
path (scheduler.py:3342 and 4240); its linker starts a load only at admission.
"""

import logging
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from tutti_sglang.integration.direct.flags import LINKER_CLASS_NAME
from tutti_sglang.integration.flags import NAME
from tutti_sglang.integration.hook import Hook

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""How long a scheduler that has nothing else to do leaves the processor to the reads."""


def _create_linker(original: Any, server_args: Any, params: Any, *, backend: str, config: Any, **more: Any) -> Any:
    # The factory builds only the names of a fixed list (unified_cache/linker_factory.py:59).
    if backend != NAME:
        return original(server_args, params, backend=backend, config=config, **more)
    from tutti_sglang.integration.linker import TuttiLinker

    return TuttiLinker(server_args, params, extra_config=config, **more)


def _name_the_source(_: Any, wrapper: Any, req: Any) -> None:
    # What a linker loads is counted as host memory otherwise (schedule_batch.py:236).
    if type(wrapper.cache_linker).__name__ == LINKER_CLASS_NAME and req.rid in wrapper.inflight_load_rids:
        req.host_hit_is_storage = True


def _linker_of(scheduler: Any) -> Any:
    """Our linker of this scheduler, if it has one."""
    wrapper = getattr(scheduler.tree_cache, "linker", None)
    linker = getattr(wrapper, "cache_linker", None)
    return linker if hasattr(linker, "arriving") else None


def _arrived(_: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    linker = _linker_of(scheduler)
    if linker is None or scheduler.disaggregation_mode.value == "decode" or req.finished():
        return
    try:
        with linker.arriving(req.rid, len(req.origin_input_ids) + len(req.output_ids)):
            req.init_next_round_input(scheduler.tree_cache, cow_mamba=False)
        linker.arrive(req.rid, req.prefix_len // scheduler.page_size)
    except Exception:
        logger.exception("tutti: nothing is read ahead for request %s", req.rid)


def _admit(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    linker = _linker_of(scheduler)
    queue = scheduler.waiting_queue
    try:
        held = linker.held([req.rid for req in queue]) if linker and queue else set()
    except Exception:
        logger.exception("tutti: no request is kept waiting for its pages")
        held = set()
    if not held:
        return original(scheduler, *args, **kwargs)
    scheduler.waiting_queue = [req for req in queue if req.rid not in held]
    if not scheduler.waiting_queue and scheduler.chunked_req is None and scheduler.running_batch.is_empty():
        linker.idle(IDLE_SECONDS)
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        left, known = {id(req) for req in scheduler.waiting_queue}, {id(req) for req in queue}
        added = [req for req in scheduler.waiting_queue if id(req) not in known]
        scheduler.waiting_queue = [req for req in queue if req.rid in held or id(req) in left] + added


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_UNIFIED = "sglang.srt.mem_cache.unified_cache"

HOOKS = (
    Hook(
        f"{_UNIFIED}.linker_factory.create_unified_cache_linker",
        HookType.AROUND,
        _create_linker,
        ("server_args", "params", "backend", "config", "components", "forward_stream"),
    ),
    Hook(
        f"{_UNIFIED}.unified_cache_linker.UnifiedCacheLinkerWrapper.load_back",
        HookType.AFTER,
        _name_the_source,
        ("self", "req"),
    ),
    Hook(f"{_SCHEDULER}._add_request_to_queue", HookType.AFTER, _arrived, ("self", "req")),
    Hook(f"{_SCHEDULER}._get_new_batch_prefill_raw", HookType.AROUND, _admit, ("self",)),
)
