"""The peer tier of one open store: everything that the object store asks of it."""

import time

from tutti_sglang.memory import Addresses
from tutti_sglang.store.getting import Getter
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.peer.sharing import Sharing
from tutti_sglang.store.peer.tier import PeerTier, Received
from tutti_sglang.store.putting import Putter
from tutti_sglang.store.sight import Flags
from tutti_sglang.store.space import Space


class Fleet:
    """Thread safe. Nothing of it waits longer than its deadline, or raises for what the fleet does."""

    def __init__(self, tier: PeerTier, sharing: Sharing) -> None:
        self.tier, self.sharing = tier, sharing

    def attach(self, space: Space, digest: bytes) -> None:
        """Share the objects of a namespace."""
        self.tier.attach(space, digest)

    def locate(self, space: Space, keys: bytes) -> Flags:
        """(n,) which objects the fleet has."""
        return self.tier.locate(space, keys)

    def get(self, space: Space, keys: bytes, rows: Addresses, deadline: float) -> Flags:
        """See PeerTier.get."""
        return self.tier.get(space, keys, rows, deadline)

    def take_received(self) -> Received:
        """See PeerTier.take_received."""
        return self.tier.take_received()

    def forget(self, space: Space) -> None:
        """See PeerTier.forget."""
        self.tier.forget(space)

    def drain(self, timeout: float) -> bool:
        """Wait until nothing waits to be kept or published; False after `timeout` seconds."""
        return self.sharing.drain(time.monotonic() + timeout)

    def describe(self) -> str:
        """For the start-up line."""
        return self.tier.describe()

    def leave(self, deadline: float) -> bool:
        """Do no more in the background, and answer no call: False when some of it does not end. Idempotent."""
        ended = self.sharing.close(deadline)
        self.tier.link.close()
        return ended

    def close(self) -> None:
        """Give the memory back, once no call is under way."""
        self.tier.memory.close()


def open_fleet(parts: Parts, getter: Getter, putter: Putter) -> Fleet | None:
    """None where no peer is configured. ConfigError, StoreError."""
    if parts.config.peer is None:
        return None
    tier = PeerTier(parts, parts.config.peer)
    fleet = Fleet(tier, Sharing(parts, tier, getter, putter))
    getter.join(fleet.get, fleet.sharing.used)
    putter.join(fleet.sharing.put)
    tier.link.start()
    fleet.sharing.start()
    return fleet
