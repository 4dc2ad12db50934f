"""An administrator at a server that is in use: attach, detach, status, clear, flush."""

import contextlib
import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.administrator import attach, prompt, when_idle
from tests.integration.server import Launch, Reply, Server, Servers
from tests.integration.stores import extra, from_storage, objects

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

ROUNDS = 100


@pytest.fixture(scope="module")
def store(drive: Path) -> Path:
    return drive / "control" / "store"


@pytest.fixture
def server(servers: Servers, control: Launch) -> Server:
    """Without storage, and with nothing in its memory."""
    server = servers.get(control)
    when_idle(server.detach)
    server.flush()
    return server


def test_storage_comes_and_goes_and_what_is_refused_changes_nothing(server: Server, store: Path) -> None:
    def status() -> dict[str, str]:
        return dict(json.loads(server.call("/hicache/storage-backend")))

    assert server.ask("GET", "/hicache/storage-backend", key="guessed")[0] == 401
    assert status()["hicache_storage_backend"] is None
    assert server.attach(extra(store), hicache_write_policy="bogus")[0] == 400
    assert not store.exists()
    server.generate(prompt(1))
    policies = {"hicache_storage_prefetch_policy": "wait_complete", "hicache_write_policy": "write_through"}
    when_idle(lambda: server.attach(extra(store), **policies))
    assert policies.items() <= status().items()
    assert status()["hicache_storage_backend"] == "tutti"
    assert objects(store) == 0
    first = server.generate(prompt(2))
    server.flush()
    from_storage(server.generate(prompt(2)), first)

    policies = {"hicache_storage_prefetch_policy": "timeout", "hicache_write_policy": "write_through_selective"}
    assert "policies updated" in when_idle(lambda: server.attach(extra(store), **policies))
    assert policies.items() <= status().items()
    stored = objects(store)
    server.generate(prompt(3))
    server.flush()
    assert objects(store) == stored, "written when it is asked for again"
    assert server.attach({}, "file")[0] == 400
    assert status()["hicache_storage_backend"] == "tutti"

    for _ in range(2):
        when_idle(server.detach)
        assert status()["hicache_storage_backend"] is None
    server.generate(prompt(4))
    server.flush()
    assert objects(store) == stored
    when_idle(lambda: server.attach(extra(store), hicache_write_policy="write_through"))
    from_storage(server.generate(prompt(2)), first)


def test_a_flush_keeps_what_is_stored_and_clear_removes_it(server: Server, store: Path) -> None:
    attach(server, store)
    first = server.generate(prompt(5))
    server.flush()
    assert objects(store) >= first.prompt_tokens // 64
    assert server.ask("POST", "/hicache/storage-backend/clear")[0] == 200
    assert objects(store) == 0
    server.flush()
    again = server.generate(prompt(5))
    assert (again.storage, again.tokens) == (0, first.tokens)
    server.flush()
    from_storage(server.generate(prompt(5)), first)


@contextlib.contextmanager
def _users(server: Server, number: int) -> Iterator[list[tuple[Reply, Reply]]]:
    """So many ask again and again for prompts whose answers are known: pairs of a first answer and a later one."""
    known = {each: server.generate(prompt(each, 200), 4) for each in range(10, 10 + 4 * number)}
    stop = threading.Event()
    pairs: list[tuple[Reply, Reply]] = []

    def use(mine: list[int]) -> None:
        for each in itertools.cycle(mine):
            if stop.wait(0.05):
                return
            pairs.append((known[each], server.generate(prompt(each, 200), 4)))

    numbers = sorted(known)
    threads = [threading.Thread(target=use, args=(numbers[user::number],)) for user in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield pairs
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_hundred_rounds_of_detach_and_attach_under_requests_leave_nothing_behind(server: Server, store: Path) -> None:
    held = []
    with _users(server, 2) as pairs:
        for each in range(ROUNDS):
            attach(server, store)
            if each % 10 == 0:
                server.ask("POST", "/flush_cache")  # refused where requests are under way
            if each in (9, ROUNDS - 1):
                held.append(_held(server))
            when_idle(server.detach)
    assert len(pairs) >= ROUNDS // 4
    assert all(first.tokens == later.tokens for first, later in pairs)
    assert any(later.storage for _, later in pairs)
    early, late = held
    assert late["files"] <= early["files"] + 8
    assert late["threads"] <= early["threads"] + 8
    assert not list((store / "owners").iterdir())


def _held(server: Server) -> Counter[str]:
    """What all processes of the server have open."""
    held = Counter[str]()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and os.getpgid(int(process.name)) == server.process.pid:
                held["files"] += len(list((process / "fd").iterdir()))
                held["threads"] += len(list((process / "task").iterdir()))
    return held
