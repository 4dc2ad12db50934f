"""What each request waits for on the host path: as a metric and, where SGLang traces, as spans below the request's own.

SGLang's calls name pages, not requests. The request is known by the operation that SGLang's threads work on: the
scheduler announces it, one thread looks it up, another reads its pages.
"""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from sglang.srt.observability import trace
from sglang.srt.plugins.hook_registry import HookType

from tutti_sglang.integration.hook import Hook
from tutti_sglang.metrics import Metrics, process_metrics

logger = logging.getLogger(__name__)

MOST = 4096
"""Requests that are remembered."""

_thread = threading.local()


def current_request() -> str | None:
    """The id of the request that this thread of SGLang's works for now."""
    return getattr(_thread, "rid", None)


class _Request:
    """`since`: when the phase began that nobody's call spans; `context`: of the request's root span."""

    __slots__ = ("context", "since")

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        self.context: Any = None


class Waits:
    """Of one process. Its threads meet in a dictionary; a phase that is lost among them is one figure less."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._requests: OrderedDict[str, _Request] = OrderedDict()

    def trace(self, rid: str, context: Any) -> None:
        """Spans of this request belong below `context`."""
        self._of(rid).context = context

    def announce(self, rid: str) -> None:
        """It waits to be looked up from now on."""
        self._of(rid).since["queue"] = time.time_ns()

    @contextlib.contextmanager
    def looking_up(self, pages: int) -> Iterator[None]:
        """Around the lookup of the present request: it has waited in SGLang's queue, and waits for SGLang then."""
        request = self._requests.get(current_request() or "")
        self._end(request, "queue")
        start = time.time_ns()
        yield
        self._note(request, "lookup", start, pages)
        if request:
            request.since["admission"] = time.time_ns()

    @contextlib.contextmanager
    def reading(self, pages: int) -> Iterator[None]:
        """Around a read of pages of the present request."""
        request = self._requests.get(current_request() or "")
        self._end(request, "admission")
        start = time.time_ns()
        yield
        self._note(request, "read", start, pages)

    def _of(self, rid: str) -> _Request:
        request = self._requests.get(rid)
        if request is None:
            request = self._requests[rid] = _Request()
            while len(self._requests) > MOST:
                self._requests.popitem(last=False)
        return request

    def _end(self, request: _Request | None, phase: str) -> None:
        start = request.since.pop(phase, None) if request else None
        if start is not None:
            self._note(request, phase, start, 0)

    def _note(self, request: _Request | None, phase: str, start: int, pages: int) -> None:
        end = time.time_ns()
        self._metrics.observe("tutti_wait_seconds", max(0, end - start) / 1e9, phase=phase)
        if request and request.context is not None:
            with contextlib.suppress(Exception):  # a picture of a request must not cost it its pages
                _span(f"tutti {phase}", request.context, (start, end), pages)


def _span(name: str, context: Any, when: tuple[int, int], pages: int) -> None:
    attributes = {"tutti.pages": pages} if pages else {}
    span = trace.tracer.start_span(name, context=context, start_time=when[0], attributes=attributes)
    span.end(end_time=when[1])


@cache
def process_waits() -> Waits:
    """The one of this process."""
    return Waits(process_metrics())


def _follow(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if not trace.get_global_tracing_enabled():
        return
    try:
        own = req.time_stats.trace_ctx
        if own.tracing_enable and own.root_span_context is not None:
            process_waits().trace(req.rid, own.root_span_context)
    except Exception:
        logger.exception("tutti: request %s is not traced", req.rid)


def _work(original: Callable[..., Any], controller: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    _thread.rid = getattr(operation, "request_id", None)
    try:
        return original(controller, operation, *args, **kwargs)
    finally:
        _thread.rid = None


_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"

WAIT_HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache", HookType.BEFORE, _follow, ("self", "req")),
    Hook(f"{_CONTROLLER}._storage_hit_query", HookType.AROUND, _work, ("self", "operation")),
    Hook(f"{_CONTROLLER}._page_transfer", HookType.AROUND, _work, ("self", "operation")),
)
