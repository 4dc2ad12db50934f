"""A real Mooncake fleet on this machine: a master, clients that lend it memory, and stores that share objects."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.kit import eventually, open_store, value
from tutti_sglang.config import PeerConfig
from tutti_sglang.integration.launch import free_port
from tutti_sglang.store import ObjectStore

MIB = 1 << 20


def require() -> None:
    """Skip where the wheel is not installed."""
    pytest.importorskip("mooncake", reason="pip install mooncake-transfer-engine-non-cuda")


def program(name: str) -> str:
    """The path of a program of the wheel."""
    import mooncake

    return str(Path(mooncake.__file__).parent / name)


class Process:
    """A program of the fleet. `where`: a command that runs another, as in `ip netns exec NAME`."""

    def __init__(self, log: Path, *command: str, where: tuple[str, ...] = ()) -> None:
        self.command, self.log = [*where, *command], log
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    def wait_for(self, text: str, seconds: float = 30.0) -> None:
        """Until its log has this text."""
        assert eventually(lambda: text in self.log.read_text(errors="replace"), seconds), self.log.read_text()[-2000:]


class Fleet:
    """A master and the memory of clients; `peer` gives settings of stores that join it. `directory`: clients find each
    other through a metadata server, and not by themselves."""

    def __init__(
        self, folder: Path, host: str = "127.0.0.1", where: tuple[str, ...] = (), *, directory: bool = False
    ) -> None:
        self.folder, self.host = folder, host
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.metrics_port = free_port(), free_port()
        self.master = Process(
            folder / "master.log",
            program("mooncake_master"),
            *("--rpc_port", str(self.port), "--metrics_port", str(self.metrics_port), "--client_ttl", "5"),
            *("--default_kv_lease_ttl", "1000"),
            where=where,
        )
        self.lenders: list[Process] = []
        self.metadata = "P2PHANDSHAKE"
        self.directory: Process | None = None
        if directory:
            port = free_port()
            self.metadata = f"http://{host}:{port}/metadata"
            command = ("-m", "mooncake.http_metadata_server", "--host", host, "--port", str(port))
            self.directory = Process(folder / "metadata.log", sys.executable, *command, where=where)

    @property
    def address(self) -> str:
        """Of the master."""
        return f"{self.host}:{self.port}"

    def lend(self, size: str = "64MB", host: str = "127.0.0.1", where: tuple[str, ...] = ()) -> Process:
        """A client that keeps objects of others in its memory, as a service of its own on each node."""
        lender = Process(
            self.folder / f"lender{len(self.lenders)}.log",
            program("mooncake_client"),
            *("--host", host, "--global_segment_size", size, "--master_server_address", self.address),
            *("--metadata_server", self.metadata, "--port", str(free_port()), "--protocol", "tcp"),
            where=where,
        )
        self.lenders.append(lender)
        lender.wait_for("Starting real client service")
        return lender

    def peer(self, **changes: Any) -> PeerConfig:
        """Settings of a store that is part of it."""
        settings: dict[str, Any] = {"kind": "mooncake", "master": self.address, "metadata": self.metadata}
        settings |= {"publish": "all", "memory": 4 * MIB}
        return PeerConfig(**(settings | changes))

    def close(self) -> None:
        """End all of it."""
        for each in [*self.lenders, self.directory, self.master]:
            if each:
                each.signal(signal.SIGCONT)
                each.kill()


@contextlib.contextmanager
def fleet_of(folder: Path, lenders: int = 1) -> Iterator[Fleet]:
    """A fleet whose memory serves."""
    require()
    fleet = Fleet(folder)
    try:
        for _ in range(lenders):
            fleet.lend()
        yield fleet
    finally:
        fleet.close()


def open_peer(drive: Path, peer: PeerConfig, **changes: Any) -> ObjectStore:
    """A store that has joined the fleet."""
    store = join(drive, peer, **changes)
    assert eventually(lambda: serves(store)), "it did not join the fleet"
    return store


def join(drive: Path, peer: PeerConfig, **changes: Any) -> ObjectStore:
    """A store that is told to."""
    return open_store(drive, peer=peer, **changes)


def serves(store: ObjectStore) -> bool:
    """Whether it asks the fleet now."""
    assert store.fleet
    return store.fleet.tier.serves


def shared(store: ObjectStore, objects: int = -1) -> bool:
    """Wait until nothing waits to be published or kept any more."""
    assert store.fleet
    return store.fleet.drain(20) and (objects < 0 or peer(store, "publish", "stored") == objects)


def peer(store: ObjectStore, operation: str, outcome: str) -> float:
    """A counter."""
    return value(store, "tutti_peer_objects", op=operation, outcome=outcome)


def worker(store: ObjectStore) -> int:
    """Process id of the store's worker."""
    assert store.fleet
    return store.fleet.tier.link.worker
