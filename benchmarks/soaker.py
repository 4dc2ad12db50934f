"""What a process of the soak does: SGLang's own cache controller with the tier behind it, and prompts that return.

What a page holds follows from its key, so that every byte that comes back can be compared, whoever stored it.
"""

import functools
import random
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.pools import Shape, device_pool, host_pool
from tutti_sglang.memory import view
from tutti_sglang.testing.faults import Fault, FaultPlan

SHAPE = Shape(8, 16, 2, 64)
"""Pages of 64 KiB."""
LONGEST = 24
"""Pages of a prompt; then another begins."""
RECENT, OLD = 0.7, 0.2
"""How likely a prompt is one of the latest, and one of any time; else it is new."""
LATEST = 40
FAULTS = {Fault.ERROR: 60, Fault.ZERO: 20, Fault.SHORT: 150, Fault.TORN: 40, Fault.LATE: 60, Fault.STALL: 2}
"""Of 65536 blocks of 4 KiB, in a life with faults."""
PATIENCE = 120.0
TRIES, PAUSE = 4, 3.0
"""How often a page that did not come is asked for again, after so many seconds: what is hidden for a while is back."""


class Case(NamedTuple):
    """`directory`: of the store, which processes share; `capacity` in bytes; `rate`: requests in a second at most."""

    directory: Path
    capacity: int
    segment: int
    seed: int
    rate: float


class Prompt(NamedTuple):
    """A prompt: its tokens, as small as they can be kept, and the keys of its pages."""

    tokens: "npt.NDArray[np.int32]"
    keys: list[str]


class Soaker:
    """The work; see soak_worker.Worker for who asks."""

    def __init__(self, case: Case) -> None:
        self._case, self._random = case, random.Random(case.seed)
        self._pool = host_pool(SHAPE, 2 * LONGEST, "page_first_direct")
        self._pages = [self._views(page) for page in range(2 * LONGEST)]
        self._prompts: list[Prompt] = []
        self._lengths: list[int] = []
        self._plan: FaultPlan | None = None
        self._controller = self._make_controller()
        self._counts: Counter[str] = Counter()

    def open(self, faults: int) -> None:
        """Attach the tier; `faults`: seed of the drive's bad blocks, 0: none."""
        from tutti_sglang.engine import select
        from tutti_sglang.engine.uring import UringEngine

        self._plan = FaultPlan(FAULTS, seed=faults, delay=0.02) if faults else None
        packed = self._plan.packed() if self._plan else None
        select.UringEngine = functools.partial(UringEngine, faults=packed)  # type: ignore[assignment,misc]
        settings = {
            "backend_name": "tutti",
            "module_path": "tutti_sglang.integration.hicache",
            "class_name": "TuttiHiCacheStorage",
            "storage_dirs": [str(self._case.directory)],
            "max_size": self._case.capacity,
            "segment_size": self._case.segment,
            "min_free_space": 0,
            "staging_size": "32MiB",
        }
        self._controller.attach_storage_backend(
            "dynamic", model_name="soak", storage_backend_extra_config=settings, host_pools=self._entries
        )

    def close(self) -> None:
        """Detach the tier, as `DELETE /hicache/storage-backend` does."""
        self._let_go()
        self._controller.detach_storage_backend()

    def work(self, seconds: float) -> dict[str, float]:
        """Requests for so long; what was done since this process began."""
        until = time.monotonic() + seconds
        due = time.monotonic()
        while (now := time.monotonic()) < until:
            if now < due:
                time.sleep(min(due, until) - now)
                continue
            self._request()
            due = max(due + 1 / self._case.rate, now - 1)
        self._let_go()
        return self.state()

    def held(self) -> list[int]:
        """Pages of each prompt's prefix that are stored now, once everything accepted is written."""
        assert self._store.drain(PATIENCE), "the store did not drain"
        return [self._backend.batch_exists(prompt.keys) for prompt in self._prompts]

    def check(self, held: list[int]) -> dict[str, float]:
        """Read what was held, each page for itself: how many, how many came, of these how many not at the first try (a
        busy drive is late, which is a miss and no loss), and how many came wrong."""
        before, found = self.state(), Counter(held=0, came=0, wrong=0, late=0)
        for prompt, count in zip(self._prompts, held, strict=True):
            if not count:
                continue
            there = np.zeros(count, np.bool_)
            for attempt in range(TRIES):
                came, equal = self._read(prompt, count)
                found.update(wrong=int((came & ~equal).sum()), late=int((came & ~there).sum()) if attempt else 0)
                there |= came
                if there.all():
                    break
                time.sleep(PAUSE)
            found.update(held=count, came=int(there.sum()))
        after = self.state()
        return dict(found) | {"torn": after["torn"] - before["torn"]}

    def _read(self, prompt: Prompt, count: int) -> tuple[Any, Any]:
        """(count,) which pages came, and which hold what their keys say."""
        self._blank(count)
        came = np.array(self._backend.batch_get_v1(prompt.keys[:count], self._slots(0, count)))
        return came, np.array([self._equal(page, prompt.keys[page]) for page in range(count)])

    def state(self) -> dict[str, float]:
        """Figures since this process began, and of the store now."""
        from tutti_sglang.metrics import process_metrics

        metrics, stats = process_metrics(), self._store.stats()
        return {
            **{name: self._counts[name] for name in ("requests", "asked", "came", "wrong", "offered", "resumed")},
            "written_bytes": metrics.value("tutti_bytes", op="write"),
            "read_bytes": metrics.value("tutti_bytes", op="read"),
            "evicted": metrics.value("tutti_evicted_objects"),
            "torn": metrics.value("tutti_missed_objects", reason="checksum"),
            "io_errors": metrics.value("tutti_io_errors"),
            "call_errors": metrics.value("tutti_call_errors"),
            "objects": stats.objects,
            "free_slots": stats.free_slots,
            "accepted": stats.accepted,
            "drives_in_service": stats.drives_in_service,
            "quarantined_bytes": self._store._parts.staging.quarantined,
            "staging_used_bytes": self._store._parts.staging.used,
        }

    def verify(self) -> dict[str, int]:
        """Read the whole store and compare files with the index: numbers of what is wrong, by kind."""
        found = self._store.verify()
        kinds = ("objects", "damaged", "unreadable", "sums", "lost", "double", "stray", "files")
        return {kind: getattr(found, kind) for kind in kinds}

    @property
    def _backend(self) -> Any:
        return self._controller.storage_backend

    @property
    def _store(self) -> Any:
        return self._backend._tier.store

    def _make_controller(self) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

        device = device_pool(SHAPE)
        self._entries = [PoolEntry(PoolName.KV, self._pool, None, lambda layer: layer, is_primary_index_anchor=True)]
        return HybridCacheController(
            SimpleNamespace(get_kvcache=lambda: device),
            HostPoolGroup(self._entries),
            SHAPE.page_size,
            None,
            threading.Event(),
            io_backend="direct",
        )

    def _request(self) -> None:
        """Some prompt, longer than the last time: what is stored is loaded, the rest computed and stored."""
        number = self._choose()
        prompt, known = self._prompts[number], self._lengths[number]
        length = self._lengths[number] = min(LONGEST, known + self._random.randint(1, 3))
        came, wrong = self._fetch(prompt, known) if known else (0, 0)
        for page in range(came, length):
            self._fill(page, prompt.keys[page])
        self._store_pages(prompt, came, length)
        self._counts.update(requests=1, asked=known, came=came, wrong=wrong, offered=length - came)

    def _choose(self) -> int:
        drawn, count = self._random.random(), len(self._prompts)
        if count and drawn < RECENT:
            number = self._random.randrange(max(0, count - LATEST), count)
            if self._lengths[number] < LONGEST:
                return number
        elif count and drawn < RECENT + OLD:
            return self._random.randrange(count)
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        tokens = [self._random.randrange(1 << 20) for _ in range(LONGEST * SHAPE.page_size)]
        self._prompts.append(
            Prompt(np.array(tokens, np.int32), get_storage_hash_str(tokens, None, page_size=SHAPE.page_size))
        )
        self._lengths.append(0)
        return count

    def _fetch(self, prompt: Prompt, pages: int) -> tuple[int, int]:
        """Prefetch a prefix: pages that came, and those of them whose bytes are others."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        controller, size = self._controller, SHAPE.page_size
        operation = controller.prefetch(CacheRequestHandle("soak", 0), prompt.tokens[: pages * size].tolist())
        found = controller.prefetch_hit_queue.get(timeout=PATIENCE)
        count = found.storage_hit_count // size
        if not count:
            return 0, 0
        self._blank(count)
        found.host_indices = self._slots(0, count)
        controller.prefetch_buffer.put(operation)
        completed = 0
        while not (answer := controller.ack_prefetch_queue.get(timeout=PATIENCE)).completed_req:
            completed = max(completed, answer.completed_tokens or 0)
        came = completed // size
        return came, sum(not self._equal(page, prompt.keys[page]) for page in range(came))

    def _store_pages(self, prompt: Prompt, first: int, last: int) -> None:
        if first >= last:
            return
        size = SHAPE.page_size
        tokens = prompt.tokens[first * size : last * size].tolist()
        self._controller.write_storage(self._slots(first, last), tokens, hash_value=prompt.keys[first:last])
        self._controller.ack_backup_queue.get(timeout=PATIENCE)

    def _slots(self, first: int, last: int) -> Any:
        import torch

        return torch.arange(first * SHAPE.page_size, last * SHAPE.page_size)

    def _views(self, page: int) -> list[Any]:
        pointers, sizes = self._pool.get_page_buffer_meta(self._slots(page, page + 1))
        return [view(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]

    def _blank(self, pages: int) -> None:
        """Nothing of what is read may be there before."""
        for page in range(pages):
            for piece in self._pages[page]:
                piece[:] = 0

    def _fill(self, page: int, key: str) -> None:
        data, at = content(key), 0
        for piece in self._pages[page]:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)

    def _equal(self, page: int, key: str) -> bool:
        return np.array_equal(np.concatenate(self._pages[page]), content(key))

    def _let_go(self) -> None:
        """End what stalls, and count what the engine carried to its end after a short transfer."""
        if self._plan:
            self._plan.gate.open()
            time.sleep(0.05)
            self._plan.gate.word[0] = 0
        counters = getattr(self._store._parts.engine, "counters", None)
        if counters:
            key = f"resumed by {id(self._store)}"
            self._counts["resumed"] += counters.resumed - self._counts[key]
            self._counts[key] = counters.resumed


def content(key: str) -> Any:
    """(page bytes,) what the page of this name holds."""
    generator = np.random.Generator(np.random.SFC64(int(key[:16], 16)))
    return generator.integers(0, 1 << 64, SHAPE.page_bytes // 8, dtype=np.uint64).view(np.uint8)
