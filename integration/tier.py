"""What one rank keeps in the store: its pools and flat objects, under the identity of the model that it serves."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

from tutti_sglang.config import load_config
from tutti_sglang.errors import UnsupportedError
from tutti_sglang.integration import identity as ids
from tutti_sglang.integration.break_even import Timing
from tutti_sglang.integration.calls import KEY_BYTES
from tutti_sglang.integration.flat import FlatObjects, Shape
from tutti_sglang.integration.pools import PoolView, view_of
from tutti_sglang.integration.served import is_repeatable, served
from tutti_sglang.integration.stored import Found, StoredPool, stored_pool
from tutti_sglang.integration.writers import Place, place
from tutti_sglang.metrics import process_metrics
from tutti_sglang.store import ABSENT, HERE, PEER, ObjectStore, Places
from tutti_sglang.store.namespace import Namespace

logger = logging.getLogger(__name__)


class Tier:
    """Opens the store that `storage.extra_config` names. `generic`: pages come as tensors, not as rows of a host pool;
    `path`: the one that the caller serves; `engine`: instead of the setting.

    Raises ConfigError, StoreError or UnsupportedError, here and in `attach`.
    """

    def __init__(self, storage: HiCacheStorageConfig, *, generic: bool, path: str = "host", engine: str = "") -> None:
        loaded = load_config(storage.extra_config or {}, rank=_world_rank(storage))
        if loaded.config.path != path:
            raise UnsupportedError(f'"path": "{loaded.config.path}" is not served here', f'Set it to "{path}"')
        self.config = loaded.config if not engine else msgspec.structs.replace(loaded.config, engine=engine)
        self._storage = storage
        self._generic = generic
        self.writes_replicas = storage.is_storage_writer
        """Of KV that several ranks hold alike one writes; the others say what is there."""
        self._identify = partial(
            served.identity,
            storage.model_name,
            loaded.config.model_id,
            trust_version=loaded.config.trust_weight_version,
        )
        self._identity = self._identify()
        self.store = ObjectStore(self.config, metrics=process_metrics())
        self.timing = Timing(loaded.config, self.store, self._identity, storage)
        self._pools: dict[str, StoredPool] = {}
        self.flat = self._flat_objects()
        logger.info("tutti: %s; %s", loaded.describe() or "default settings", self.store.describe())

    def attach(self, name: str, pool: Any) -> None:
        """Keep the pages of a host pool; again with the same pool does nothing."""
        view = view_of(pool, ids.head_groups(self._identity, self._storage, pool) if name == PoolName.KV else 1)
        if self.attach_view(name, view) and name == PoolName.KV and self._generic and not view.logical:
            self.flat.open(Shape(view.page_bytes, pool.dtype))

    def attach_view(self, name: str, view: PoolView) -> bool:
        """Keep the pages of a pool whose map is known; False if they were kept before."""
        known = self._pools.get(name)
        if known is not None and known.view.maps == view.maps and known.view.pool is view.pool:
            return False
        self._pools[name] = self._stored(name, view)
        for namespace in self._pools[name].namespaces[:1]:
            logger.info("tutti: %s", namespace.readable())
        return True

    def pool(self, name: str) -> StoredPool:
        """The pool as it is stored now: it changes with the weights."""
        return self._pools[name]

    @property
    def anchor_is_logical(self) -> bool:
        """Whether a page is what its side pools hold, and nothing else (DeepSeek-V4)."""
        anchor = self._pools.get(PoolName.KV)
        return anchor is not None and anchor.view.logical

    def lookup(self, name: str, keys: bytes) -> Found:
        """(n,) which pages of the pool are there; of the anchor also those that came as flat tensors."""
        pool = self._pools.get(name)
        found = pool.lookup(keys) if pool else np.zeros(len(keys) // KEY_BYTES, np.bool_)
        return found | self.flat.lookup(keys) if name == PoolName.KV else found

    def locate(self, name: str, keys: bytes) -> Places:
        """(n,) where each page is: as `lookup`, and the fleet is asked for what is not here."""
        pool = self._pools.get(name)
        places = pool.locate(keys) if pool else np.zeros(len(keys) // KEY_BYTES, np.uint8)
        if name == PoolName.KV:
            places[(places == ABSENT) & self.flat.lookup(keys)] = HERE
        return places

    def get(self, name: str, keys: bytes, indices: torch.Tensor | None, deadline: float) -> Found:
        """(n,) which pages were filled."""
        pool = self._pools.get(name)
        if pool is None or indices is None:
            return np.zeros(len(keys) // KEY_BYTES, np.bool_)
        return pool.get(keys, indices, deadline)

    def put(self, name: str, keys: bytes, indices: torch.Tensor | None, deadline: float, depth: int = 0) -> Found:
        """(n,) which pages are stored or accepted. Of replicated KV one rank writes; the others say what is there."""
        pool = self._pools.get(name)
        if pool is None or indices is None:
            return np.zeros(len(keys) // KEY_BYTES, np.bool_)
        return pool.put(keys, indices, deadline, depth) if self.writes(pool.view) else pool.lookup(keys)

    def writes(self, view: PoolView) -> bool:
        """Whether this rank stores such pages: of replicated KV one rank does."""
        return bool(ids.is_sharded(self._storage, view) or self.writes_replicas)

    def page_bytes(self, name: str) -> int:
        """Payload bytes of a page of the pool; 0 of one that is not kept."""
        pool = self._pools.get(name)
        return pool.view.page_bytes if pool else 0

    def keeps_shards(self, name: str) -> bool:
        """Whether the pool is kept, and its bytes differ between TP ranks."""
        pool = self._pools.get(name)
        return pool is not None and pool.view.sharded

    def worth_loading(self, lengths: Sequence[int], places: Places, rid: str | None = None) -> int:
        """Of the numbers of pages that can be restored (ascending), the one with which the request starts soonest.
        `places`: (n,) where each page of the prefix is; `rid`: as of Timing.pages."""
        anchor = self._pools.get(PoolName.KV)
        if anchor is None:
            return lengths[-1] if lengths else 0
        nbytes = anchor.view.page_bytes or sum(pool.view.page_bytes for pool in self._pools.values())
        return self.timing.pages(lengths, anchor.view.page_size, nbytes, np.cumsum(places == PEER).tolist(), rid)

    def moved(self, nbytes: int, seconds: float) -> None:
        """A get of this thread took so long; 0 bytes: not all came. What it waited for the fleet is told apart."""
        received = self.store.take_received()
        self.timing.received(*received)
        self.timing.loaded(nbytes - received.nbytes, seconds - received.seconds)

    def clear(self) -> int:
        """Remove the objects of this rank's namespaces; how many."""
        return sum(pool.clear() for pool in self._pools.values()) + self.flat.clear()

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks of a server, named for people."""
        facts: dict[str, str] = msgspec.structs.asdict(self._identity) | {"kv_heads": str(self._identity.kv_heads)}
        return {name.replace("_", " "): value for name, value in facts.items()}

    def place(self) -> Place:
        """Where this rank writes, for the other ranks."""
        return place(self._storage, self.config)

    def renew(self) -> None:
        """Go on under the identity that the model has now."""
        self._drop_unrepeatable()
        self._identity = self._identify()
        self._pools = {name: self._stored(name, pool.view) for name, pool in self._pools.items()}
        self.flat = self._flat_objects()

    def close(self, timeout: float) -> bool:
        """Write what was accepted and close the store; False when some of it did not make it."""
        self._drop_unrepeatable()
        self.timing.close()
        return self.store.close(timeout)

    def _drop_unrepeatable(self) -> None:
        if not is_repeatable(self._identity):
            self.clear()

    def _stored(self, name: str, view: PoolView) -> StoredPool:
        # What no other server can have, or find again, is not for a fleet.
        share = is_repeatable(self._identity)
        return stored_pool(self.store, view, ids.namespaces(self._identity, self._storage, view, str(name)), share)

    def _flat_objects(self) -> FlatObjects:
        # Holds no reference to this object: a cycle would keep a detached store's files until the next collection.
        return FlatObjects(self.store, partial(_flat_namespace, self._identity, self._storage, self._pools))


def _flat_namespace(
    identity: ids.Identity, storage: HiCacheStorageConfig, pools: dict[str, StoredPool], nbytes: int, dtype: str
) -> Namespace:
    anchor = pools.get(PoolName.KV)
    return ids.flat_namespace(identity, storage, anchor.view if anchor else None, nbytes, dtype)


def _world_rank(storage: HiCacheStorageConfig) -> int:
    """What `{rank}` stands for: the process's rank in its replica, which attention DP hides in `tp_rank`."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_rank() if distributed else storage.tp_rank)
