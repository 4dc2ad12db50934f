"""The backends and linkers of this process, for hooks that must reach all of them."""

import weakref
from typing import Protocol


class Live(Protocol):
    """What a hook may do to each."""

    closed: bool

    def suspend(self, reason: str) -> None:
        """Neither read nor write until the next flush: what SGLang holds now may be of another model."""

    def flushed(self) -> None:
        """SGLang has dropped its cache."""

    def close(self) -> None:
        """Write what was accepted and give everything back. Idempotent."""


_live: "weakref.WeakSet[Live]" = weakref.WeakSet()


def add(one: Live) -> None:
    """It is alive until it is closed."""
    _live.add(one)


def live_backends() -> list[Live]:
    """Those that are not closed."""
    return [one for one in _live if not one.closed]
