"""What the store needs of a fleet's engine; another engine is another file like `mooncake.py`.

An implementation is made and used in the worker process only. Its calls block for as long as they like, several at a
time from several threads; the other side has the deadlines.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tutti_sglang.config import PeerConfig
from tutti_sglang.errors import ConfigError


class State(enum.IntEnum):
    """What became of one object in a call."""

    ABSENT = 0
    DONE = 1  # it is there, has arrived, was stored
    FAILED = 2
    EXISTS = 3  # of a put: somebody else had stored it


class Place(NamedTuple):
    """Memory of the worker that was registered with the engine."""

    address: int
    size: int


class PeerError(Exception):
    """A whole call failed: the fleet, or a part of it that all calls need, cannot be reached."""


class Peer(Protocol):
    """Objects of the fleet by name. PeerError."""

    def exists(self, names: Sequence[str]) -> list[State]:
        """DONE, ABSENT or FAILED for each."""

    def get(self, names: Sequence[str], places: Sequence[Place]) -> list[State]:
        """Fill each place; DONE only where the object has exactly its size."""

    def put(self, names: Sequence[str], places: Sequence[Place]) -> list[State]:
        """Store what lies there. An object is seen by others whole or not at all."""

    def remove(self, prefix: str) -> int:
        """Remove all objects whose names begin so; how many."""

    def health(self) -> None:
        """Return if a call would have a chance."""

    def close(self) -> None:
        """Leave the fleet; memory that was offered to it goes with us."""


def connect(settings: PeerConfig, memory: Place) -> Peer:
    """Join the fleet. PeerError, ConfigError."""
    if settings.kind == "mooncake":
        from tutti_sglang.store.peer.mooncake import MooncakePeer

        return MooncakePeer(settings, memory)
    raise ConfigError(f"peer: no engine is called {settings.kind!r}")
