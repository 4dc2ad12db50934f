"""Hooks around SGLang's attach of a storage backend: all ranks or none, and nothing half done where one fails.

SGLang attaches on each rank by itself and then makes process groups, which waits for every rank for ever: without this
a rank that cannot open its drive stops the others (managers/cache_controller.py:614, :635).
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from sglang.srt.plugins.hook_registry import HookType

from tutti_sglang.config import read_extra_config
from tutti_sglang.errors import ConfigError
from tutti_sglang.integration.flags import CLASS_NAME, NAME
from tutti_sglang.integration.hook import Hook
from tutti_sglang.integration.ranks import SERVING_SECONDS, START_SECONDS, Attempt
from tutti_sglang.integration.writers import Place, let_write, must_write

logger = logging.getLogger(__name__)


class _Attaching:
    """Where this process stands. Ranks count alike: each request to attach reaches all of them in the same order."""

    def __init__(self) -> None:
        self.requests = self.attaches = 0
        self.opened = False
        self.attempt: Attempt | None = None

    def request(self) -> None:
        """An administrator asks for a storage backend."""
        self.requests, self.attaches = self.requests + 1, 0

    def begin(self) -> Attempt:
        """A controller attaches: at start, or as a request asks it to."""
        self.attempt = self.next()
        self.attaches, self.opened = self.attaches + 1, False
        return self.attempt

    def next(self) -> Attempt:
        """The attempt that the other ranks would have, or will have, now."""
        seconds = SERVING_SECONDS if self.requests else START_SECONDS
        return Attempt(f"{self.requests}.{self.attaches}", seconds)


_attaching = _Attaching()


def _attach_together(
    original: Callable[..., Any], controller: Any, storage_backend: str, *args: Any, **kwargs: Any
) -> None:
    ours = _is_ours(storage_backend, kwargs.get("storage_backend_extra_config") or {})
    if not ours or _attaching.attempt is not None:
        original(controller, storage_backend, *args, **kwargs)
        return
    attempt = _attaching.begin()
    try:
        _refuse_pools(kwargs.get("host_pools") or ())
        attempt.agree({})
        original(controller, storage_backend, *args, **kwargs)
        attempt.agree({})
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # the store went with rank 0
            attempt.fail(error)
        _detach(controller)
        raise
    finally:
        _attaching.attempt = None


def _refuse_pools(host_pools: Any) -> None:
    # Before the first file is made: side pools are registered at the very end.
    from tutti_sglang.integration.pools import view_of

    for entry in host_pools:
        view_of(entry.host_pool)


def _detach(controller: Any) -> None:
    """What SGLang does not roll back: pools that were refused after its threads had started (hybrid …:355)."""
    if controller.enable_storage:
        try:
            controller.detach_storage_backend()
        except RuntimeError:
            logger.exception("tutti: the storage that could not be attached is not detached cleanly")


def _agree_before_groups(controller: Any) -> None:
    attempt = _attaching.attempt
    if attempt is not None and not _attaching.opened:
        _attaching.opened = True
        backend = _backend(controller)
        notes = attempt.agree(backend.facts(), msgspec.json.encode(backend.place()).decode())
        places = [msgspec.json.decode(note, type=Place) for note in notes]
        if must_write(backend.place(), places) and not controller.storage_config.is_storage_writer:
            let_write(controller)
            backend.let_write()


def _backend(controller: Any) -> Any:
    """Below SGLang's fault injector, where it is on."""
    return getattr(controller.storage_backend, "_backend", controller.storage_backend)


def _attach_over_http(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    _attaching.request()
    _complete(recv_req, scheduler.page_size)
    output = original(scheduler, recv_req)
    if not _attaching.attaches:  # refused here, or attached already: no other rank must wait for this one
        _attaching.next().fail(output.message)
    return output


def _complete(recv_req: Any, page_size: int) -> None:
    """The default that a launch has (flags.py): reads from one page on. A text that is no config is SGLang's matter."""
    with contextlib.suppress(ConfigError):
        extra = read_extra_config(recv_req.hicache_storage_backend_extra_config_json)
        if _is_ours(recv_req.hicache_storage_backend, extra) and "prefetch_threshold" not in extra:
            extra["prefetch_threshold"] = page_size
            recv_req.hicache_storage_backend_extra_config_json = msgspec.json.encode(extra).decode()
            logger.info("tutti: prefetch_threshold=%d tokens, a page (it was not given)", page_size)


def _is_ours(storage_backend: str, extra: Mapping[str, Any]) -> bool:
    return storage_backend == NAME or extra.get("class_name") == CLASS_NAME


def _choose_zero_copy(_: None, controller: Any, *args: Any, **kwargs: Any) -> None:
    # SGLang picks the pair by a list of names (managers/cache_controller.py:645). Nothing is queued before it returns.
    if controller.storage_backend_type == NAME:
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy
        if controller.prefetch_capacity_limit < controller.prefetch_threshold:
            logger.warning(
                "tutti: the host pool has room for reads of %d tokens, less than the %d of prefetch_threshold: nothing "
                "will be read from the store. Raise --hicache-ratio or --hicache-size",
                controller.prefetch_capacity_limit,
                controller.prefetch_threshold,
            )


_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"


def _write_own_shards(original: Any, controller: Any, transfer: Any) -> bool:
    # SGLang asks the ranks that do not write the KV only for Mamba states and, by the name of a backend, for drafts.
    if original(controller, transfer):
        return True
    keeps_shards = getattr(_backend(controller), "keeps_shards", None)
    return keeps_shards is not None and keeps_shards(transfer.name)


HOOKS = (
    Hook(f"{_CONTROLLER}.attach_storage_backend", HookType.AFTER, _choose_zero_copy, ("self", "storage_backend")),
    Hook(f"{_CONTROLLER}.attach_storage_backend", HookType.AROUND, _attach_together, ("self", "storage_backend")),
    Hook(f"{_HYBRID}.attach_storage_backend", HookType.AROUND, _attach_together, ("self", "storage_backend")),
    Hook(f"{_HYBRID}.should_backup", HookType.AROUND, _write_own_shards, ("self", "transfer")),
    Hook(f"{_CONTROLLER}._create_sync_groups", HookType.BEFORE, _agree_before_groups, ("self",)),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped",
        HookType.AROUND,
        _attach_over_http,
        ("self", "recv_req"),
    ),
)
