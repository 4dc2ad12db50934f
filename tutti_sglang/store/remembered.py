"""What the last lookups of this process asked for, and what the last looks saw: batches of one request follow each
other, and only the first of many need ask the index."""

import threading
import time
from collections import deque
from typing import NamedTuple

from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.sight import Sight

KEPT = 16
"""Requests that are remembered: as many may wait for their pages at once."""

STRETCH = 1024
"""Keys that one look is for, where the request has as many."""

SECONDS = 10.0
"""How long a look is remembered. What changes meanwhile costs a read for nothing, never a wrong byte."""


class _Look(NamedTuple):
    namespace: int
    keys: bytes
    sight: Sight
    state: bytes | None
    until: float


class Recalled(NamedTuple):
    """`sight`: of the keys that were asked for; `state`: of the index before that look; `after`: of as many keys,
    `following`, that came next in it."""

    sight: Sight
    state: bytes | None
    following: bytes
    after: Sight


class Remembered:
    """Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._looks: deque[_Look] = deque(maxlen=KEPT)

    def expect(self, namespace: int, keys: bytes) -> None:
        """Gets of these keys, in this order, may follow."""
        with self._lock:
            self._requests.append((namespace, keys))

    def stretch(self, namespace: int, keys: bytes) -> bytes:
        """These keys and those that are likely to be asked for next; empty where none is."""
        with self._lock:
            requests = [known for number, known in self._requests if number == namespace]
        for known in reversed(requests):
            if (at := _find(keys, known)) is not None:
                return known[at : at + max(len(keys), STRETCH * KEY_SIZE)]
        return b""

    def add(self, namespace: int, keys: bytes, sight: Sight, state: bytes | None) -> None:
        """A look."""
        with self._lock:
            self._looks.append(_Look(namespace, keys, sight, state, time.monotonic() + SECONDS))

    def recall(self, namespace: int, keys: bytes) -> Recalled | None:
        """What a look saw of these keys, the latest that asked for all of them in this order."""
        now = time.monotonic()
        with self._lock:
            looks = [look for look in self._looks if look.namespace == namespace and look.until > now]
        for look in reversed(looks):
            if (at := _find(keys, look.keys)) is not None:
                end, beyond = at + len(keys), at + 2 * len(keys)
                this, after = slice(at // KEY_SIZE, end // KEY_SIZE), slice(end // KEY_SIZE, beyond // KEY_SIZE)
                return Recalled(look.sight.some(this), look.state, look.keys[end:beyond], look.sight.some(after))
        return None

    def forget(self) -> None:
        """Everything."""
        with self._lock:
            self._requests.clear()
            self._looks.clear()


def _find(keys: bytes, known: bytes) -> int | None:
    """Where these keys begin among the known ones."""
    at = known.find(keys)
    while at > 0 and at % KEY_SIZE:
        at = known.find(keys, at + 1)
    return at if at >= 0 else None
