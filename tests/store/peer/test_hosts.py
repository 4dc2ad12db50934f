"""Hosts with networks of their own: namespaces of the kernel, joined by cables that can be slow or be pulled out.

host a ── cable ── infra (master, memory) ── cable ── host b
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.store.kit import eventually
from tests.store.peer.fleet_kit import Fleet, require

ROOT = Path(__file__).parents[3]
INFRA = "10.77.0.1"
PAGES = range(40)
TIMEOUT = 2.0
SLACK = 5.0
"""For a machine that is busy with other things."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@dataclass(frozen=True)
class Cable:
    """Between infra and a host. `address`: the host's."""

    infra: str
    name: str
    address: str

    def pull(self) -> None:
        run("ip", "-n", self.infra, "link", "set", self.name, "down")

    def plug(self) -> None:
        run("ip", "-n", self.infra, "link", "set", self.name, "up")

    def silence(self) -> None:
        """The host is heard, and gets no answer: what is sent to it is dropped on the way, and nobody is told."""
        run("ip", "-n", self.infra, "route", "add", "blackhole", f"{self.address}/32")

    def answer(self) -> None:
        run("ip", "-n", self.infra, "route", "del", "blackhole", f"{self.address}/32")

    def slow(self, rate: str) -> None:
        """What flows towards the host."""
        command = ("tc", "qdisc", "replace", "dev", self.name, "root", "tbf", "rate", rate, "burst", "32kbit")
        run("ip", "netns", "exec", self.infra, *command, "latency", "4s")

    def fast(self) -> None:
        run("ip", "netns", "exec", self.infra, "tc", "qdisc", "del", "dev", self.name, "root")


class Host:
    """A store on a host; its calls, with the seconds that each took."""

    def __init__(self, space: str, store: Path, settings: dict[str, Any], log: Path) -> None:
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "tests.store.peer.host", str(store)]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                cwd=ROOT,
            )

    def ask(self, command: str, *numbers: int) -> Any:
        """The answer."""
        return self.timed(command, *numbers)[0]

    def timed(self, command: str, *numbers: int) -> tuple[Any, float]:
        """And how long it took."""
        self.send(command, *numbers)
        return self.receive()

    def send(self, command: str, *numbers: int) -> None:
        """Without waiting."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([command, *numbers]) + "\n")
        self.process.stdin.flush()

    def receive(self) -> tuple[Any, float]:
        """The answer to `send`."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the host died"
        answer, seconds = json.loads(line)
        return answer, seconds

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Network:
    """Namespaces and cables, named for this process."""

    def __init__(self) -> None:
        self.infra = f"tutti{os.getpid()}"
        self.spaces = [self.infra]
        run("ip", "netns", "add", self.infra)
        run("ip", "-n", self.infra, "link", "set", "lo", "up")
        run("ip", "-n", self.infra, "addr", "add", f"{INFRA}/32", "dev", "lo")

    def host(self, number: int) -> tuple[str, Cable]:
        """A namespace and its cable."""
        space, cable = f"{self.infra}-{number}", Cable(self.infra, f"cable{number}", f"10.77.{number}.2")
        run("ip", "netns", "add", space)
        self.spaces.append(space)
        run("ip", "link", "add", cable.name, "netns", self.infra, "type", "veth", "peer", "name", "up0", "netns", space)
        run("ip", "-n", self.infra, "addr", "add", f"10.77.{number}.1/24", "dev", cable.name)
        run("ip", "-n", self.infra, "link", "set", cable.name, "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", space, "addr", "add", f"{cable.address}/24", "dev", "up0")
        run("ip", "-n", space, "link", "set", "up0", "up")
        run("ip", "-n", space, "route", "add", "default", "via", f"10.77.{number}.1")
        return space, cable

    def close(self) -> None:
        for space in self.spaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", space)


class World:
    """Two hosts of a fleet."""

    def __init__(self, network: Network, disk: Path) -> None:
        (a, self.cable_a), (b, self.cable_b) = network.host(1), network.host(2)
        self.fleet = Fleet(disk / "fleet", INFRA, ("ip", "netns", "exec", network.infra))
        self.fleet.lend(host=INFRA, where=("ip", "netns", "exec", network.infra))
        settings = msgspec.to_builtins(self.fleet.peer(timeout=TIMEOUT))
        self.a = Host(a, disk / "a", settings, disk / "a.log")
        self.b = Host(b, disk / "b", settings | {"keep": False}, disk / "b.log")
        for host in (self.a, self.b):
            assert eventually(lambda host=host: host.ask("serves"), 60)

    def close(self) -> None:
        for host in (self.a, self.b):
            host.close()
        self.fleet.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    require()
    try:
        network = Network()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here (root and iproute2 are needed): {error}")
    try:
        made = World(network, tmp_path_factory.mktemp("hosts"))
        assert made.a.ask("put", *PAGES) == len(PAGES)
        assert made.a.ask("shared")
        yield made
        made.close()
    finally:
        network.close()


def _heals(host: Host) -> bool:
    return eventually(lambda: host.ask("serves") and host.ask("get", *PAGES) == len(PAGES), 90)


def test_a_host_that_is_cut_off_serves_what_it_has_and_finds_back(world: World) -> None:
    b = world.b
    assert b.ask("get", *PAGES) == len(PAGES)
    b.ask("put", *range(100, 110))
    world.cable_b.pull()
    found, took = b.timed("get", *PAGES)
    assert found == 0
    assert took < TIMEOUT + SLACK
    assert b.ask("get", *range(100, 110)) == 10
    found, took = b.timed("get", *PAGES)
    assert (found, took < SLACK) == (0, True), "nobody waits twice"
    assert world.a.ask("get", *PAGES) == len(PAGES)
    world.cable_b.plug()
    assert _heals(b)


def test_a_host_that_is_heard_and_gets_no_answer_waits_once_and_finds_back(world: World) -> None:
    b = world.b
    assert _heals(b)
    world.cable_b.silence()
    found, took = b.timed("get", *PAGES)
    assert (found, took < TIMEOUT + SLACK) == (0, True)
    assert b.ask("get", *range(100, 110)) == 10
    found, took = b.timed("get", *PAGES)
    assert (found, took < SLACK) == (0, True), "nobody waits twice"
    world.cable_b.answer()
    assert _heals(b)


def test_a_cable_that_is_pulled_out_in_the_middle_of_a_get(world: World) -> None:
    b = world.b
    assert _heals(b)
    world.cable_b.slow("1mbit")  # a megabyte takes eight seconds
    b.send("get", *PAGES)
    world.cable_b.pull()
    found, took = b.receive()
    assert found < len(PAGES)
    assert took < TIMEOUT + SLACK
    world.cable_b.plug()
    world.cable_b.fast()
    assert _heals(b)
    assert b.ask("wrong") == 0


def test_a_slow_cable_costs_one_deadline_and_no_more(world: World) -> None:
    b = world.b
    assert _heals(b)
    world.cable_b.slow("200kbit")
    times = [b.timed("get", *PAGES)[1] for _ in range(4)]
    assert max(times) < TIMEOUT + SLACK
    world.cable_b.fast()
    assert _heals(b)


def test_what_one_host_wrote_another_restores_after_it_is_gone(world: World) -> None:
    assert world.a.ask("put", *range(200, 240)) == 40
    assert world.a.ask("shared")
    world.a.close()
    world.cable_a.pull()
    assert eventually(lambda: world.b.ask("get", *range(200, 240)) == 40, 60)
    assert world.b.ask("close")
