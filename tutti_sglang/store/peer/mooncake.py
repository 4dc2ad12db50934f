"""Mooncake Store as the fleet's engine (https://github.com/kvcache-ai/Mooncake): a client that keeps nothing itself,
unless it is told to offer memory."""

import importlib.util
import re
import socket
from collections.abc import Sequence
from typing import Any

from tutti_sglang.config import PeerConfig
from tutti_sglang.errors import ConfigError
from tutti_sglang.store.peer.base import PeerError, Place, State

# mooncake-store/include/types.h
NOT_FOUND, ALREADY_EXISTS = -704, -705
_UNREACHABLE = -900
"""And below: errors of the RPC to the master."""


def require() -> None:
    """ConfigError where the wheel is not installed."""
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            'peer: "kind": "mooncake" needs the Python package mooncake, which is not installed',
            "Run: pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine, for RDMA into GPUs too)",
        )


class MooncakePeer:
    """See base.Peer."""

    def __init__(self, settings: PeerConfig, memory: Place) -> None:
        require()
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        host = settings.host or own_address(settings.master)
        code = self._store.setup(
            host, settings.metadata, settings.offer, 0, settings.protocol, settings.devices, settings.master
        )
        if code:
            raise PeerError(f"Mooncake's client could not join the master at {settings.master} as {host} (code {code})")
        if code := self._store.register_buffer(memory.address, memory.size):
            raise PeerError(f"Mooncake did not take {memory.size} bytes of memory (code {code})")

    def exists(self, names: Sequence[str]) -> list[State]:
        """See base.Peer."""
        codes = self._store.batch_is_exist(list(names))
        return self._states(codes, {1: State.DONE, 0: State.ABSENT}, len(names))

    def get(self, names: Sequence[str], places: Sequence[Place]) -> list[State]:
        """See base.Peer."""
        codes = self._store.batch_get_into(list(names), [p.address for p in places], [p.size for p in places])
        states = self._states(codes, {NOT_FOUND: State.ABSENT}, len(names))
        sizes = [place.size for place in places]
        return [State.DONE if code == size else state for code, size, state in zip(codes, sizes, states, strict=True)]

    def put(self, names: Sequence[str], places: Sequence[Place]) -> list[State]:
        """See base.Peer."""
        codes = self._store.batch_put_from(list(names), [p.address for p in places], [p.size for p in places])
        return self._states(codes, {0: State.DONE, ALREADY_EXISTS: State.EXISTS}, len(names))

    def remove(self, prefix: str) -> int:
        """See base.Peer."""
        count = int(self._store.remove_by_regex(f"^{re.escape(prefix)}", True))
        if count < 0:
            raise PeerError(f"Mooncake's master could not remove objects (code {count})")
        return count

    def health(self) -> None:
        """See base.Peer."""
        self.exists(["tutti"])  # health_check() says 0 for a while after the master has died

    def close(self) -> None:
        """See base.Peer."""
        self._store.close()

    def _states(self, codes: Any, known: dict[int, State], count: int) -> list[State]:
        if len(codes) != count or (count and all(code <= _UNREACHABLE for code in codes)):
            raise PeerError(f"Mooncake's master does not answer (code {codes[0] if codes else 'none'})")
        return [known.get(code, State.FAILED) for code in codes]


def own_address(master: str) -> str:
    """This machine's address on the way to the master. No packet is sent."""
    host, _, port = re.split("[,;]", master.split("://")[-1])[0].rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise PeerError(f"The master's address {master!r} leads nowhere: {error}") from error
