"""Weights that change while a server serves, by each of SGLang's routes over HTTP: old KV is never restored."""

import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.administrator import attach, prompt, when_idle
from tests.integration.server import Launch, Reply, Server, Servers
from tests.integration.stores import from_storage
from tests.integration.trainer import Trainer
from tutti_sglang.integration.cpu_model import write_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

ROUTES = ("disk", "tensor", "distributed", "ipc")
PROMPT = prompt(1000, 300)
_seeds = itertools.count(1)


class World:
    """A server with the tier, and somebody who changes its weights."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.checkpoint = server, folder / "checkpoint"
        self.checkpoint.mkdir(parents=True)
        self.trainer = Trainer(server, self.checkpoint)

    def update(self, route: str, **fields: object) -> tuple[int, str]:
        """By weights that nobody has seen, written over the last ones: same path, same shapes."""
        write_model(self.checkpoint, seed=next(_seeds))
        return self.trainer.update(route, **fields)

    def ask(self) -> Reply:
        """With nothing in memory."""
        self.server.flush()
        return self.server.generate(PROMPT)

    def renewed(self, before: Reply, first: Reply | None = None) -> Reply:
        """What the server says now is new, was not restored when it was first asked, and is from then on."""
        first = first or self.ask()
        assert first.storage == first.host == first.device == 0
        assert first.tokens != before.tokens
        from_storage(self.ask(), first)
        return first


@pytest.fixture(scope="module")
def world(servers: Servers, control: Launch, drive: Path) -> Iterator[World]:
    server = servers.get(control)
    when_idle(server.detach)
    attach(server, drive / "weights" / "store")
    yield World(server, drive / "weights")
    servers.close()


@pytest.mark.parametrize("route", ROUTES)
def test_new_weights_restore_nothing_of_the_old(route: str, world: World) -> None:
    before = world.ask()
    from_storage(world.ask(), before)
    for version in (route, route, None):  # the same version twice, though the weights are others
        status, text = world.update(route, weight_version=version)
        assert status == 200, text
        before = world.renewed(before, world.server.generate(PROMPT))  # the update has flushed


@pytest.mark.parametrize("route", ROUTES)
def test_between_an_update_and_its_flush_nothing_is_restored_or_stored(route: str, world: World) -> None:
    before = world.ask()
    status, text = world.update(route, weight_version="named", flush_cache=False)
    assert status == 200, text
    assert world.server.generate(PROMPT).storage == 0
    assert world.server.generate([32, *PROMPT]).storage == 0, "computed by the new weights, and not stored"
    world.server.flush()
    assert world.server.generate([32, *PROMPT]).storage == 0
    world.renewed(before)


@pytest.mark.parametrize("route", ROUTES)
def test_an_update_whose_flush_is_refused_restores_nothing_until_the_next_flush(route: str, world: World) -> None:
    server, before = world.server, world.ask()
    body = {"input_ids": prompt(7, 100), "stream": True}
    body["sampling_params"] = {"max_new_tokens": 4000, "ignore_eos": True}
    with urllib.request.urlopen(server.request("/generate", body)) as running:
        running.readline()  # it is under way
        server.call("/pause_generation", {"mode": "in_place"})
        status, text = world.update(route)
        assert status == 400
        assert "not flushed" in text
        server.call("/continue_generation", {})
        assert server.generate(PROMPT).storage == 0
        server.call("/abort_request", {"abort_all": True})
        running.read()
    world.renewed(before)


def test_a_version_told_by_name_alone_restores_nothing_of_before(world: World) -> None:
    before = world.ask()
    server = world.server
    assert json.loads(server.call("/update_weight_version", {"new_version": "told"}))["success"]
    server.flush()
    again = server.generate(PROMPT)
    assert (again.storage, again.tokens) == (0, before.tokens)
    from_storage(world.ask(), before)


def test_weights_that_did_not_arrive_restore_nothing_until_the_next_flush(world: World) -> None:
    before = world.ask()
    from_storage(world.ask(), before)
    (world.checkpoint / "model.safetensors").write_bytes(b"no weights")
    assert world.trainer.update("ipc")[0] == 400
    assert world.server.generate([33, *PROMPT]).storage == 0
    again = world.ask()
    assert (again.storage, again.tokens) == (0, before.tokens)
