"""Hooks into SGLang's scheduler processes, in one table, and the check that each of them took.

SGLang logs a hook that fails and goes on; a server that silently keeps nothing would be the result. `require` therefore
looks at each target when the storage is attached and stops the launch by name.
"""

import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tutti_sglang import SGLANG_VERSION
from tutti_sglang.errors import HookError
from tutti_sglang.integration.flags import CLASS_NAME, NAME

logger = logging.getLogger(__name__)


class Hook(NamedTuple):
    """`parameters`: those of the target that the hook relies on, in order; None = any."""

    target: str
    kind: HookType
    function: Callable[..., Any]
    parameters: tuple[str, ...]


def _create_backend(original: Any, cls: Any, name: str, backend_class: Any, storage_config: Any, pool: Any) -> Any:
    # The factory builds only the names of a fixed list (storage/backend_factory.py:173).
    if name == NAME:
        return backend_class(storage_config, pool)
    return original(cls, name, backend_class, storage_config, pool)


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


def _refuse_pools(controller: Any, storage_backend: str, *args: Any, host_pools: Any = None, **kwargs: Any) -> None:
    # Side pools are registered when the threads already run and nothing is rolled back any more: look before.
    if storage_backend == NAME:
        from tutti_sglang.integration.pools import view_of

        for entry in host_pools or ():
            view_of(entry.host_pool)


def _close_backends(*args: Any, **kwargs: Any) -> None:
    # Host memory is unpinned and dropped here, before SGLang's own detach at exit (unified_radix_cache.py:603).
    for backend in _live_backends():
        backend.close()


def _take_identity(*args: Any, **kwargs: Any) -> None:
    # The first moment at which the configuration is published, and the last before files are read.
    try:
        _served().take()
    except Exception:
        logger.exception("tutti: the model's identity will be taken when the storage is attached")


def _suspend_backends(*args: Any, **kwargs: Any) -> None:
    _served().change()
    for backend in _live_backends():
        backend.suspend("the weights are being updated")


def _suspend_at_new_version(scheduler: Any, new_version: str | None) -> None:
    from sglang.srt.runtime_context import get_serving

    if new_version is not None and new_version != get_serving().weight_version:
        _suspend_backends()


def _resume_backends(flushed: bool, *args: Any, **kwargs: Any) -> None:
    if flushed:
        for backend in _live_backends():
            backend.flushed()


def _served() -> Any:
    from tutti_sglang.integration.served import served

    return served


def _live_backends() -> list[Any]:
    from tutti_sglang.integration.hicache import live_backends

    return live_backends()


_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

HOOKS = (
    Hook(
        "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory._create_builtin_backend",
        HookType.AROUND,
        _create_backend,
        ("cls", "backend_name", "backend_class", "storage_config", "mem_pool_host"),
    ),
    Hook(f"{_CONTROLLER}.attach_storage_backend", HookType.AFTER, _choose_zero_copy, ("self", "storage_backend")),
    Hook(f"{_HYBRID}.attach_storage_backend", HookType.BEFORE, _refuse_pools, ("self", "storage_backend")),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.release_host_resources",
        HookType.BEFORE,
        _close_backends,
        ("self",),
    ),
    *(
        Hook(f"{_UPDATER}.{name}", HookType.BEFORE, _suspend_backends, ("self", "recv_req"))
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "begin_weight_update",
        )
    ),
    Hook(
        f"{_SCHEDULER}.record_weight_version_change",
        HookType.BEFORE,
        _suspend_at_new_version,
        ("self", "new_version"),
    ),
    Hook(f"{_SCHEDULER}.init_model_config", HookType.AFTER, _take_identity, ("self",)),
    Hook(f"{_SCHEDULER}.flush_cache", HookType.AFTER, _resume_backends, ("self",)),
)


_installed = False


def install() -> None:
    """Register all hooks and the backend's name; SGLang applies them after the last plugin."""
    global _installed
    _installed = True
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    # The class is asked of this module (see __getattr__), so that no backend comes to be without the check.
    StorageBackendFactory.register_backend(NAME, __name__, CLASS_NAME)


def ensure() -> None:
    """For the `dynamic` route in a scheduler that loads no plugins (Ray): the backend must see weight updates and the
    end of the process there too."""
    if not _installed and "sglang.srt.managers.scheduler" in sys.modules:
        install()
        HookRegistry.apply_hooks()
    if _installed and missing():
        logger.warning("tutti: %s", _explain(missing()))


def missing() -> list[str]:
    """Targets whose hook did not take, or that look different from what the hook relies on."""
    return [hook.target for hook in HOOKS if not _took(hook)]


def require() -> None:
    """HookError unless every hook took."""
    names = missing()
    if names:
        hint = f"Install sglang=={SGLANG_VERSION}, or a tutti-sglang that was made for your version"
        raise HookError(_explain(names), hint)


def _explain(names: list[str]) -> str:
    return f"SGLang {sglang.__version__} is not the {SGLANG_VERSION} expected: no hook into {', '.join(names)}"


def _took(hook: Hook) -> bool:
    try:
        function = inspect.unwrap(target := pkgutil.resolve_name(hook.target))
        names = [*inspect.signature(function).parameters]
    except (ImportError, AttributeError, ValueError):
        return False
    fits = tuple(names[: len(hook.parameters)]) == hook.parameters
    return fits and any(each is hook.function for each in _wrapped_hooks(target))


def _wrapped_hooks(function: Any) -> list[Any]:
    """Everything that the wrappers around a function hold (hook_registry._wrap_fn keeps the hook in its closure)."""
    found: list[Any] = []
    while function is not None:
        found += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        function = getattr(function, "__wrapped__", None)
    return found


def __getattr__(name: str) -> Any:
    if name != CLASS_NAME:
        raise AttributeError(name)
    require()
    from tutti_sglang.integration.hicache import TuttiHiCacheStorage

    return TuttiHiCacheStorage
