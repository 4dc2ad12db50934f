"""What can be restored for a request: from what is staged for it, or from the index where staging does not serve.

Staging does not serve with `preload = 0`, for a prefix larger than that memory, and for pages that the device still
held when the request arrived.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tutti_sglang.integration.calls import key_bytes
from tutti_sglang.integration.direct.preload import Preloader, Waiting, Wanted
from tutti_sglang.integration.direct.room import Place
from tutti_sglang.integration.prefix import restorable
from tutti_sglang.integration.stored import Found, StoredPool
from tutti_sglang.store import ABSENT, Places

FRESH_SECONDS = 0.5
"""How long an answer from the index is given again: SGLang asks at every pass of its scheduler."""


Worth = Callable[[str, int, list[int], Places], int]
"""Request, tokens of its prompt (0: not known), numbers of pages that can be restored, where each page is → how many to
load: one of the numbers, or 0."""


class _Answer(NamedTuple):
    question: tuple[int, str, int]
    pages: list[int]
    until: float


class Lookups:
    """On the scheduler thread only. `streams`: whether pages that are not staged can be read into their slots; `worth`:
    what of a prefix is read ahead."""

    def __init__(
        self, pools: Callable[[str], StoredPool], preloader: Preloader | None, worth: Worth, *, streams: bool
    ) -> None:
        self._pools, self._preloader, self._worth, self._streams = pools, preloader, worth, streams
        self._answers: dict[str, _Answer] = {}
        self._arriving, self._tokens = "", 0
        self.tail: list[str] = []

    @contextmanager
    def arriving(self, rid: str, tokens: int) -> Iterator[None]:
        """The lookup of this request, a prompt of so many `tokens`, is its first: nothing is reported yet."""
        self._arriving, self._tokens, self.tail = rid, tokens, []
        try:
            yield
        finally:
            self._arriving = ""

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """All lengths in pages at which every pool's policy holds."""
        keys = transfers[0].keys
        if rid == self._arriving:
            self._arrive(rid, keys, transfers)
            return []
        waiting = self._preloader.find(rid) if self._preloader else None
        if self._preloader and not waiting:
            return []
        question = (len(keys), keys[0], waiting.version if waiting else 0)
        answer = self._answers.get(rid)
        if answer is None or answer.question != question or time.monotonic() > answer.until:
            streams = self._streams and (waiting is None or waiting.truncated or keys[0] not in waiting.tail)
            pages, _ = restorable(partial(self._found, waiting, keys, streams), transfers[1:])
            if len(self._answers) > 1024:
                self._answers.clear()
            answer = self._answers[rid] = _Answer(question, pages, time.monotonic() + FRESH_SECONDS)
        return answer.pages

    def claim(self, rid: str, transfers: list[PoolTransfer]) -> dict[str, list[Place | None]]:
        """Where each page of each transfer is staged, None where it is not. What is not claimed is given back."""
        self._answers.pop(rid, None)
        waiting = self._preloader.claim(rid) if self._preloader else None
        staged = waiting.staged if waiting else {}
        places = {each.name: [staged.get(each.name, {}).pop(key, None) for key in each.keys] for each in transfers}
        if waiting and self._preloader:
            self._preloader.give_back(waiting)
        return places

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()

    def _arrive(self, rid: str, keys: list[str], transfers: list[PoolTransfer]) -> None:
        self.tail = keys
        if not self._preloader:
            return
        # Without what belongs to the device: a plan outlives this call.
        sides = [replace(each, keys=list(each.keys or ()), device_indices=None) for each in transfers[1:]]
        worth = partial(self._worth, rid, self._tokens)
        plan = partial(_wanted, keys, sides, partial(self._located, key_bytes(keys)), worth)
        self._preloader.want(rid, keys, plan if self._pools(PoolName.KV).shares else plan())

    def _located(self, keys: bytes, name: str) -> Places:
        return self._pools(name).locate(keys)

    def _stored(self, keys: bytes, name: str) -> Found:
        return self._pools(name).lookup(keys)

    def _found(self, waiting: Waiting | None, keys: list[str], streams: bool, name: str) -> Found:
        staged = waiting.staged.get(name, {}) if waiting else {}
        found = np.fromiter((key in staged for key in keys), np.bool_, len(keys))
        return found | self._stored(key_bytes(keys), name) if streams and not found.all() else found


def _wanted(
    keys: list[str],
    sides: list[PoolTransfer],
    located: Callable[[str], Places],
    worth: Callable[[list[int], Places], int],
) -> Wanted:
    """The pages of each pool that let as much of the prefix be restored as is worth it."""
    places = located(PoolName.KV)
    pages, _ = restorable(lambda name: (places if name == PoolName.KV else located(name)) != ABSENT, sides)
    length = worth(pages, places)
    wanted: Wanted = {PoolName.KV: keys[:length]}
    for side in sides:
        window = length if side.hit_policy == PoolHitPolicy.ALL_PAGES else len(side.keys or ())
        wanted[side.name] = keys[max(0, length - window) : length]
    return wanted
