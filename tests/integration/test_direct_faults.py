"""Real servers on the direct path whose drive is slow, fails, or evicts what is being loaded: every reply that comes
has the tokens that were computed, and the server goes on."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import bad_disk, plugins
from tests.integration.server import Launch, Reply, Server, Servers, hicache
from tests.integration.stores import extra, from_storage
from tests.store.kit import eventually
from tutti_sglang.cli.scrape import look

pytestmark = [pytest.mark.server, pytest.mark.matrix, pytest.mark.timeout(1500)]

TOKENS, OUTPUT = 2000, 8
PAGES = TOKENS // 64


class World:
    """A store on a drive that can be told to misbehave, and servers over it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mood = folder / "mood"
        plugins.install(folder / "plugin", bad_disk)

    def mood(self, words: str) -> None:
        """What its drive does from now on."""
        self._mood.write_text(words)

    def launch(self, *flags: str, **settings: object) -> Launch:
        """Small stores, apart from one another."""
        environ = (("PYTHONPATH", str(self._folder / "plugin")), (bad_disk.VARIABLE, str(self._mood)))
        store = self._folder / "-".join(["store", *map(str, settings.values())])
        all_of = extra(store, path="direct", engine="threads", break_even="off") | settings
        return Launch(flags=hicache("tutti", "--enable-metrics", *flags, extra=all_of), environ=environ)


@pytest.fixture(scope="module")
def world(drive: Path) -> Iterator[World]:
    folder = drive / "direct-faults"
    folder.mkdir()
    yield World(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _well(world: World) -> Iterator[None]:
    world.mood("")
    yield
    world.mood("")


def _prompt(number: int) -> list[int]:
    return [32 + (number * 7919 + place * 31 + place * place) % 95 for place in range(TOKENS)]


def _ask(server: Server, number: int) -> Reply:
    return server.generate(_prompt(number), OUTPUT)


def _again(server: Server, number: int) -> Reply:
    server.flush()
    return _ask(server, number)


def _failed(server: Server) -> float:
    return look(server.url).total("tutti_load_requests", outcome="failed")


def _unharmed(server: Server) -> bool:
    return server.alive and look(server.url).total("tutti_call_errors") == 0


@pytest.mark.parametrize("preload", ["1GiB", "0"])
def test_a_slow_drive_is_awaited(servers: Servers, world: World, preload: str) -> None:
    server = servers.get(world.launch(preload=preload))
    first = _ask(server, 0)
    world.mood("slow 200")  # 5 MB/s for each thread
    from_storage(_again(server, 0), first)
    assert _failed(server) == 0
    assert _unharmed(server)


def test_what_a_failing_drive_does_not_give_in_the_forward_pass_is_an_error_once_and_then_computed(
    servers: Servers, world: World
) -> None:
    """SGLang 0.5.23 can do no more when a load fails after it began."""
    server = servers.get(world.launch(preload="0"))
    first = _ask(server, 1)
    server.flush()
    world.mood("fail")
    body = {"input_ids": _prompt(1), "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT}}
    status, _ = server.ask("POST", "/generate", body)
    assert status == 503
    assert _failed(server) == 1
    computed = _again(server, 1)
    assert (computed.tokens, computed.storage) == (first.tokens, 0)
    world.mood("")
    assert eventually(lambda: _again(server, 1).storage > 0, 120), "the drive serves again"
    from_storage(_again(server, 1), first)
    assert _unharmed(server)


def test_what_a_failing_drive_does_not_give_while_a_request_waits_is_computed(servers: Servers, world: World) -> None:
    server = servers.get(world.launch(preload="1GiB"))
    first = _ask(server, 2)
    server.flush()
    world.mood("fail")
    for _ in range(3):
        computed = _again(server, 2)
        assert (computed.tokens, computed.storage) == (first.tokens, 0)
    assert _failed(server) == 0
    world.mood("")
    assert eventually(lambda: _again(server, 2).storage > 0, 120), "the drive serves again"
    from_storage(_again(server, 2), first)
    assert _unharmed(server)


@pytest.mark.parametrize("preload", ["1GiB", "0"])
def test_what_is_evicted_while_it_is_loaded_gives_no_other_tokens(servers: Servers, world: World, preload: str) -> None:
    """A store of a few prompts, from which each is loaded slowly while others push it out."""
    sizes = {"max_size": "48MiB", "min_free_space": "1MiB", "segment_size": "4MiB"}
    server = servers.get(world.launch("--max-total-tokens", "8192", preload=preload, **sizes))
    known = [_ask(server, number) for number in range(10, 22)]
    world.mood("slow 100")
    replies: list[tuple[int, Reply]] = []

    def use(start: int) -> None:
        for step in range(12):
            number = (start + 5 * step) % 12
            replies.append((number, _ask(server, 10 + number)))

    for _ in range(2):
        server.flush()
        threads = [threading.Thread(target=use, args=(start,)) for start in (0, 3, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(replies) == 2 * 3 * 12
    assert all(reply.tokens == known[number].tokens for number, reply in replies)
    assert any(reply.storage for _, reply in replies)
    metrics = look(server.url)
    assert metrics.total("tutti_evicted_objects") > 0, json.dumps(sorted(metrics.samples))
    assert _failed(server) == 0
    assert _unharmed(server)
