"""Hooks into SGLang's scheduler processes, in one table, and the check that each of them took.

SGLang logs a hook that fails and goes on; a server that silently keeps nothing would be the result. `require` therefore
looks at each target when the storage is attached and stops the launch by name.
"""

import inspect
import logging
import pkgutil
import sys
from typing import Any

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tutti_sglang import SGLANG_VERSION
from tutti_sglang.errors import HookError
from tutti_sglang.integration import attaching, updating
from tutti_sglang.integration.break_even import BREAK_EVEN_HOOKS
from tutti_sglang.integration.direct import hooks as direct
from tutti_sglang.integration.flags import CLASS_NAME, NAME
from tutti_sglang.integration.hook import Hook
from tutti_sglang.integration.live import live_backends
from tutti_sglang.integration.scheduler_hooks import SCHEDULER_HOOKS
from tutti_sglang.integration.waits import WAIT_HOOKS

logger = logging.getLogger(__name__)


def _create_backend(original: Any, cls: Any, name: str, backend_class: Any, storage_config: Any, pool: Any) -> Any:
    # The factory builds only the names of a fixed list (storage/backend_factory.py:173).
    if name == NAME:
        return backend_class(storage_config, pool)
    return original(cls, name, backend_class, storage_config, pool)


def _close_backends(*args: Any, **kwargs: Any) -> None:
    # Host memory is unpinned and dropped here, before SGLang's own detach at exit (unified_radix_cache.py:603).
    for backend in live_backends():
        backend.close()


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory._create_builtin_backend",
        HookType.AROUND,
        _create_backend,
        ("cls", "backend_name", "backend_class", "storage_config", "mem_pool_host"),
    ),
    *(
        Hook(f"sglang.srt.{owner}.release_host_resources", HookType.BEFORE, _close_backends, ("self",))
        for owner in (
            "mem_cache.unified_radix_cache.UnifiedRadixCache",
            "disaggregation.decode_kvcache_offload_manager.DecodeKVCacheOffloadManager",  # its tree may be another
        )
    ),
    *attaching.HOOKS,
    *updating.HOOKS,
    *direct.HOOKS,
    *SCHEDULER_HOOKS,
    *BREAK_EVEN_HOOKS,
    *WAIT_HOOKS,
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


def demand() -> None:
    """As `ensure`; HookError in a scheduler where one is missing."""
    ensure()
    if _installed:
        require()


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
