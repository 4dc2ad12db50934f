"""SGLang's external linker (UnifiedCacheLinker): layers flow between the store and the device pools, no host tier.

Every method is called on the scheduler thread (sglang mem_cache/unified_cache/unified_cache_linker.py:118). None
raises; what `lookup` reports and `load` accepts is the same on all ranks after SGLang has compared them.
"""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from tutti_sglang.config import load_config
from tutti_sglang.errors import StoreError
from tutti_sglang.integration import hooks, live
from tutti_sglang.integration.calls import Calls, guarded, key_bytes
from tutti_sglang.integration.direct.batches import LayerCounter, Load, Part
from tutti_sglang.integration.direct.choosing import choose_mover
from tutti_sglang.integration.direct.loading import Loader
from tutti_sglang.integration.direct.lookups import Lookups
from tutti_sglang.integration.direct.offload import Offloader, Pages
from tutti_sglang.integration.direct.pacing import Pacing
from tutti_sglang.integration.direct.pools import device_pools
from tutti_sglang.integration.direct.preload import Preloader
from tutti_sglang.integration.direct.room import Room
from tutti_sglang.integration.direct.setup import Ranks, open_tier, refuse, storage_config, together
from tutti_sglang.integration.hashing import load_hashing
from tutti_sglang.metrics import process_metrics
from tutti_sglang.schedule.gate import process_gate
from tutti_sglang.store import Places
from tutti_sglang.units import format_size

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 9.0
BOUNCE_BYTES = 64 << 20
"""Host memory for offloads of movers that do not reach the slots."""


class TuttiLinker(UnifiedCacheLinker):  # type: ignore[misc]  # the wheel has no types
    """The direct path of one rank. Raises ConfigError, StoreError, HookError or UnsupportedError here, never later."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Iterable[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        hooks.demand()
        self.closed = self._off = False
        self.forward_stream = forward_stream
        with together() as attempt:
            refuse(params)
            requests = params.req_to_token_pool
            self.pools = device_pools(params.token_to_kv_pool_allocator.get_kvcache(), components, requests)
            replicated = not self.pools[PoolName.KV].view.sharded
            storage = storage_config(params, extra_config or {}, replicated=replicated)
            engine = load_config(storage.extra_config or {}).config.engine
            self._mover = choose_mover(self.pools.values(), engine, forward_stream)
            load_hashing()
            self._tier = open_tier(storage, attempt, CLOSE_SECONDS, self._mover.engine)
            for address, size in self._mover.memory:
                self._tier.store.register(address, size)
        self._ranks = Ranks(params)
        self._metrics = process_metrics()
        self._calls = Calls(self._metrics)
        self._begin()
        if PoolName.MAMBA in self.pools:  # SGLang itself tells the KV pool alone (registry.py:216)
            requests.register_layer_transfer_counter(self.layer_done_counter)
        live.add(self)
        preload = format_size(self._tier.config.preload) if self._tier.config.preload else "off"
        logger.info("tutti: direct path, mover %s, preload %s", self._mover.name, preload)

    def _begin(self) -> None:
        for name, pool in self.pools.items():
            self._tier.attach_view(name, pool.view)
        layers = max(len(pool.layers) for pool in self.pools.values())
        self.layer_done_counter = LayerCounter(layers)
        self._room, bounce = self._memory(self._tier.config.preload), None
        if not self._mover.reaches:
            bounce = self._memory(BOUNCE_BYTES)
        self._preloader = None
        if self._room:
            self._preloader = Preloader(
                self._room, self._tier.pool, self._metrics, self._fault("preload"), self._tier.moved
            )
            self._room.freed = self._preloader.wake
        self._lookups = Lookups(self._tier.pool, self._preloader, self._worth, streams=self._mover.fetches)
        give = self._room.give if self._room else lambda places: None
        page_bytes = self.pools[PoolName.KV].view.page_bytes
        pacing = Pacing(self._tier.timing, self._tier.store, page_bytes, process_gate(), self._metrics)
        self._loader = Loader(self._mover, layers, give, self._metrics, self._fault("load"), pacing)
        self._offloader = Offloader(
            self._mover,
            self._tier.pool,
            lambda pool: self._tier.writes(pool.view),
            max(1, self.pools[PoolName.KV].view.pages // 4),
            self._fault("offload"),
            bounce,
        )
        self._queued: dict[str, Load] = {}

    def _memory(self, size: int) -> Room | None:
        if not size:
            return None
        try:
            room = Room(size, self._metrics)
        except (OSError, ValueError, OverflowError) as error:
            raise StoreError(f"No {format_size(size)} of memory for reading ahead: {error}", "Lower preload") from error
        self._mover.register(room.address, room.size)
        return room

    def _fault(self, call: str) -> Any:
        return lambda error: self._calls.report(call, error)

    def _worth(self, rid: str, tokens: int, lengths: list[int], places: Places) -> int:
        page = self.pools[PoolName.KV].view.page_size
        try:
            if tokens:
                before = max(0, (tokens - 1) // page - len(places)) * page  # the last token is always computed
                self._tier.timing.announce(rid, before, tokens - before)
            return self._tier.worth_loading(lengths, places, rid)
        except Exception as error:  # noqa: BLE001 - all ranks compare the same requests: this one must not lack one
            self._calls.report("break-even", error)
            return lengths[-1] if lengths else 0

    def arriving(self, rid: str, tokens: int = 0) -> AbstractContextManager[None]:
        """While this context lasts, `lookup` of this request only notes what is to be read ahead: what is worth it for
        a prompt of so many `tokens`, all of it where that is not known."""
        return self._lookups.arriving(rid, tokens)

    def arrive(self, rid: str, depth: int) -> None:
        """The request waits for admission now; the device holds the first `depth` pages of its prompt."""
        self._offloader.note_depths(self._lookups.tail, depth)

    @guarded(lambda *_, **__: [])
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """All lengths in pages that can be restored: what is staged, or stored where staging does not serve."""
        return [] if self._off else self._lookups.lookup(rid, transfers)

    def held(self, rids: list[str]) -> set[str]:
        """Requests of the queue that should not be admitted yet, because pages are still being read for them. The same
        on all ranks, which call this together."""
        if self._preloader is None or self._off or self.closed:
            return set()
        self._preloader.order(rids)
        self._preloader.make_room()
        tracked = [waiting for rid in rids if (waiting := self._preloader.find(rid))]
        ready = self._ranks.all([waiting.is_ready() for waiting in tracked]) if tracked else []
        return {waiting.rid for waiting, good in zip(tracked, ready, strict=True) if not good}

    def idle(self, seconds: float) -> None:
        """Leave the processor to the reads, until something changed or for so long."""
        if self._preloader:
            self._preloader.wait(seconds)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Claim what is staged and hold what is stored; False, on all ranks, when some of it is there no more."""
        queued = None
        try:
            queued = self._prepare(rid, transfers)
        except Exception as error:  # noqa: BLE001 - the other ranks wait in the comparison
            self._calls.report("load", error)
        (good,) = self._ranks.all([queued is not None])
        if queued and good:
            self._queued[rid] = queued
        elif queued:
            self._loader.release(queued)
        return good

    def _prepare(self, rid: str, transfers: list[PoolTransfer]) -> Load | None:
        staged = self._lookups.claim(rid, transfers)
        parts = [Part(self.pools[t.name], t.device_indices, staged[t.name]) for t in transfers]
        load = Load(rid, parts)
        try:
            good = all(self._open(load, part, t.keys) for part, t in zip(parts, transfers, strict=True))
        except BaseException:
            self._loader.release(load)
            raise
        if not good:
            self._loader.release(load)
        return load if good else None

    def _open(self, load: Load, part: Part, keys: list[str]) -> bool:
        """Hold the slots of pages that are not staged; False when some are gone."""
        missing = [key for key, place in zip(keys, part.places, strict=True) if place is None]
        if missing and self._mover.fetches:
            part.layers = load.held.enter_context(self._tier.pool(part.pool.name).layers(key_bytes(missing)))
        return not missing or bool(part.layers and np.all(part.layers.found))

    def start_layer_wise_loading(self) -> int:
        """Start what was queued; the index under which the forward pass waits for its layers."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        return self.layer_done_counter.add(self._loader.start(loads))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until no drive can write into a slot any more; False when a page did not come: SGLang then aborts the
        requests of the batch (503)."""
        batch = self.layer_done_counter.take(counter_index)
        return True if batch is None else self._loader.finish(batch)

    def cancel_queued_load(self, rid: str) -> bool:
        """Whether the load was queued and is not any more."""
        if self._preloader:
            self._preloader.forget(rid)
        load = self._queued.pop(rid, None)
        if load:
            self._metrics.add("tutti_load_requests", outcome="cancelled")
            self._loader.release(load)
        return load is not None

    @guarded(lambda *_, **__: False)
    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue the pages of a node."""
        if self._off or any(transfer.name not in self.pools for transfer in transfers):
            return False
        parts = [Pages(self.pools[each.name], list(each.keys), each.device_indices) for each in transfers if each.keys]
        return bool(parts) and self._offloader.offer(parts, self.record_offload_ready)

    def num_completed_offloads(self) -> int:
        """Results that wait."""
        return self._offloader.completed()

    def pop_completed_offload(self) -> bool:
        """The oldest of them."""
        return self._offloader.pop()

    def reset(self) -> None:
        """Nothing reads or writes the device pools when this returns, and nothing is queued or pending."""
        if self._preloader:
            self._preloader.clear()
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for batch in self.layer_done_counter.reset():
            self._loader.finish(batch)
        self._loader.sweep(wait=True)
        self._offloader.reset()
        self._lookups.clear()

    def suspend(self, reason: str) -> None:
        """Neither read nor write until the next flush: what SGLang holds now may be of another model."""
        if not self._off:
            self._off = True
            logger.warning("tutti: %s: the tier is off until the cache is flushed", reason)
        if self._preloader:
            self._preloader.clear()
        self._lookups.clear()

    def flushed(self) -> None:
        """SGLang has dropped its cache: write what was accepted or, after new weights, go on under a new identity."""
        if not self._off:
            self._tier.store.drain(CLOSE_SECONDS)
        else:
            self._tier.renew()
            self._off = False

    def close(self) -> None:
        """Store what was accepted and give everything back. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._calls.shut(CLOSE_SECONDS / 3)
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        if self._preloader:
            self._preloader.close()
        for batch in self.layer_done_counter.reset():
            self._loader.finish(batch)
        self._loader.close()
        self._offloader.close()
        if not self._tier.close(CLOSE_SECONDS):
            logger.warning("tutti: some accepted pages could not be written in time and are lost")
