"""Hooks around weight updates: from its first sign until the cache is flushed the tier neither reads nor writes.

SGLang's flush empties its tree, not the storage, and its keys know no weights (managers/scheduler_components/
weight_updater.py). Hooked before each route, whatever it answers: an update that failed may have changed some weights.
"""

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from tutti_sglang.integration.hook import Hook
from tutti_sglang.integration.live import live_backends

logger = logging.getLogger(__name__)


def _take_identity(*args: Any, **kwargs: Any) -> None:
    # The first moment at which the configuration is published, and the last before files are read.
    try:
        _served().take()
    except Exception:
        logger.exception("tutti: the model's identity will be taken when the storage is attached")


def _suspend(*args: Any, **kwargs: Any) -> None:
    _served().change()
    for backend in live_backends():
        backend.suspend("the weights are being updated")


def _update_from_disk(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    _suspend()
    with _served().loading(recv_req.model_path, recv_req.load_format):
        return original(updater, recv_req)


def _note_version(scheduler: Any, new_version: str | None) -> None:
    # Called with None too, when an update has succeeded and before its flush (weight_updater.py:120).
    from sglang.srt.runtime_context import get_serving

    served = _served()
    if new_version is not None and new_version != get_serving().weight_version and served.flushed:
        _suspend()  # said by /update_weight_version alone: weights came by a way that SGLang does not see
    served.succeed(new_version)


def _end_session(updater: Any, recv_req: Any) -> None:
    session = updater._session
    if session is not None and not session.loaded_weights:
        _suspend()  # written from elsewhere (RDMA) since it began; a flush in between proves nothing


def _resume_after_session(result: Any, updater: Any, recv_req: Any) -> None:
    if result.success and _served().flushed:
        _resume()


def _resume_after_flush(flushed: bool, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if flushed:
        _served().flush()
        if scheduler.weight_updater._session is None:
            _resume()


def _resume() -> None:
    for backend in live_backends():
        try:
            backend.flushed()
        except Exception:
            logger.exception("tutti: the tier stays off until the cache is flushed again")


def _served() -> Any:
    from tutti_sglang.integration.served import served

    return served


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

HOOKS = (
    Hook(f"{_SCHEDULER}.init_model_config", HookType.AFTER, _take_identity, ("self",)),
    Hook(f"{_UPDATER}.update_weights_from_disk", HookType.AROUND, _update_from_disk, ("self", "recv_req")),
    *(
        Hook(f"{_UPDATER}.{name}", HookType.BEFORE, _suspend, ("self", "recv_req"))
        for name in (
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "begin_weight_update",
        )
    ),
    Hook(f"{_UPDATER}.end_weight_update", HookType.BEFORE, _end_session, ("self", "recv_req")),
    Hook(f"{_UPDATER}.end_weight_update", HookType.AFTER, _resume_after_session, ("self", "recv_req")),
    Hook(f"{_SCHEDULER}.record_weight_version_change", HookType.BEFORE, _note_version, ("self", "new_version")),
    Hook(f"{_SCHEDULER}.flush_cache", HookType.AFTER, _resume_after_flush, ("self",)),
)
