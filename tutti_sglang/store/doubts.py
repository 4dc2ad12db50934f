"""Objects that could not be read: no longer claimed by lookups of this process, and removed from the index by the
writer."""

import threading
import time

import numpy as np
import numpy.typing as npt

from tutti_sglang.store.slots import Slots

HIDDEN_SECONDS = 30.0
"""How long an object whose drive failed is not claimed: the next request may find the drive well again."""

_HIDDEN_MAX = 1 << 16


class Doubts:
    """Thread safe. `hide` for what may come back, `condemn` for what will not or is about to be replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hidden: dict[tuple[int, bytes], float] = {}
        self._condemned: dict[tuple[int, bytes], int] = {}

    @property
    def any(self) -> bool:
        """Whether there is anything in doubt."""
        return bool(self._hidden or self._condemned)

    def hide(self, namespace: int, keys: list[bytes]) -> None:
        """Do not claim these for HIDDEN_SECONDS."""
        until = time.monotonic() + HIDDEN_SECONDS
        with self._lock:
            if len(self._hidden) > _HIDDEN_MAX:
                self._hidden.clear()
            self._hidden.update(((namespace, key), until) for key in keys)

    def condemn(self, namespace: int, keys: list[bytes], slots: Slots) -> None:
        """Never claim these again; the writer deletes them where they still have these slots."""
        with self._lock:
            self._condemned.update(((namespace, key), slot) for key, slot in zip(keys, slots.tolist(), strict=True))

    def trusted(self, namespace: int, keys: list[bytes]) -> npt.NDArray[np.bool_]:
        """(n,) False for what is hidden or condemned."""
        now = time.monotonic()
        with self._lock:
            doubted = [
                (namespace, key) in self._condemned or self._hidden.get((namespace, key), now) > now for key in keys
            ]
        return ~np.array(doubted, dtype=np.bool_)

    def condemned(self) -> dict[int, tuple[list[bytes], Slots]]:
        """Namespace → keys and slots that are to be deleted; report with `settled`. Ends what was hidden for long."""
        now = time.monotonic()
        with self._lock:
            for name in [name for name, until in self._hidden.items() if until <= now]:
                del self._hidden[name]
            entries = list(self._condemned.items())
        out: dict[int, tuple[list[bytes], list[int]]] = {}
        for (namespace, key), slot in entries:
            keys, slots = out.setdefault(namespace, ([], []))
            keys.append(key)
            slots.append(slot)
        return {each: (keys, np.array(slots, dtype=np.int64)) for each, (keys, slots) in out.items()}

    def settled(self, namespace: int, keys: list[bytes]) -> None:
        """They are out of the index."""
        with self._lock:
            for key in keys:
                self._condemned.pop((namespace, key), None)
                self._hidden.pop((namespace, key), None)
