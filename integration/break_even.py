"""What is already there of a request that is looked up: SGLang's `batch_exists` gets keys alone.

The scheduler thread announces a request before SGLang queues its lookup; the lookup runs in another thread, which knows
the request by `waits.current_request`.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_schedule

from tutti_sglang import SGLANG_VERSION
from tutti_sglang.config import Config
from tutti_sglang.integration import waits
from tutti_sglang.integration.hook import Hook
from tutti_sglang.integration.identity import Identity
from tutti_sglang.metrics import process_metrics
from tutti_sglang.schedule.gate import process_gate
from tutti_sglang.schedule.judge import Judge
from tutti_sglang.schedule.profiling import saved_drives
from tutti_sglang.schedule.slack import Table
from tutti_sglang.store import ObjectStore
from tutti_sglang.store.directory import PROFILES

logger = logging.getLogger(__name__)

_timings: "weakref.WeakSet[Timing]" = weakref.WeakSet()


def chunk_tokens() -> int:
    """Most tokens of a prefill step; 0: no limit, or nobody says."""
    try:
        return max(0, int(get_schedule().chunked_prefill_size or 0))
    except (ValueError, AttributeError, TypeError):
        return 0


def table_identity(identity: Identity, storage: Any) -> dict[str, str]:
    """Everything that decides how long a prefill takes."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "model": identity.model,
        "kv_dtype": identity.kv_dtype,
        "device": device,
        "tp": str(storage.tp_size),
        "pp": str(getattr(storage, "pp_size", 1)),
        "sglang": SGLANG_VERSION,
    }


class Timing:
    """What a backend's store is told about time and asked about: the scheduler's steps, and which loads pay."""

    def __init__(self, config: Config, store: ObjectStore, identity: Identity, storage: Any) -> None:
        self._folder = config.index_path / PROFILES
        self._store = store
        self.table = Table.load(self._folder, table_identity(identity, storage))
        self.drives = saved_drives(self._folder)
        self._judge = Judge(self.table, process_metrics(), chunk_tokens()) if config.break_even == "on" else None
        self._saved = self.table.count
        if self._judge and self.drives:
            for nbytes, seconds in self.drives.loads:
                self._judge.measured(nbytes, seconds)
        if self.table.known:
            logger.info("tutti: %d prefill times of this model and device are known", self.table.count)
        _timings.add(self)
        process_gate().attach(store.window)
        process_gate().clockwork = self.table

    def announce(self, rid: str, prefix: int, new: int) -> None:
        """As Judge.announce."""
        if self._judge:
            self._judge.announce(rid, prefix, new)

    def pages(
        self, lengths: Sequence[int], page_tokens: int, page_bytes: int, remote: Sequence[int], rid: str | None = None
    ) -> int:
        """How many pages of the request `rid` are worth loading, by default of the one that is looked up now. `remote`:
        as Judge.pages."""
        if not self._judge:
            return lengths[-1] if lengths else 0
        return self._judge.pages(rid or waits.current_request(), lengths, page_tokens, page_bytes, remote)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Pages came from the drives. While some lie in memory the time says nothing of the drives."""
        if self._judge and nbytes > 0 and not self._store.pending:
            self._judge.loaded(nbytes, seconds)

    def received(self, nbytes: int, seconds: float) -> None:
        """As Judge.received."""
        if self._judge and nbytes > 0:
            self._judge.received(nbytes, seconds)

    def save(self) -> None:
        """Keep what was measured for the next start."""
        if self.table.count > self._saved:
            self._saved = self.table.count
            with contextlib.suppress(OSError):
                self.table.save(self._folder)

    def close(self) -> None:
        """Be told no more."""
        _timings.discard(self)
        gate = process_gate()
        gate.detach(self._store.window)
        if gate.clockwork is self.table:
            gate.clockwork = None
        self.save()


def _announce(original: Callable[..., Any], cache: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        _tell(cache, request, args, kwargs)
    except Exception:
        logger.exception("tutti: a request could not be announced, it will be loaded whatever it costs")
    return original(cache, request, *args, **kwargs)


def _tell(cache: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    new = kwargs.get("new_input_tokens", args[1] if len(args) > 1 else ())
    matched = kwargs.get("matched_prefix_tokens", args[4] if len(args) > 4 else None)
    waits.process_waits().announce(request.rid)
    for timing in list(_timings):
        timing.announce(request.rid, len(matched or ()), len(new) + 1)  # the last token is always computed


BREAK_EVEN_HOOKS = (
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.prefetch_from_storage",
        HookType.AROUND,
        _announce,
        (
            "self",
            "request",
            "last_host_node_id",
            "new_input_tokens",
            "last_hash",
            "prefix_keys",
            "matched_prefix_tokens",
        ),
    ),
)
