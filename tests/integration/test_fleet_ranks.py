"""A real server of two ranks in a fleet: it restores what another store's ranks published, and the fleet of one rank
that hangs or dies costs a prompt's pages, never the prompt."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.administrator import FLAGS
from tests.integration.server import Launch, Reply, Server
from tests.integration.stores import extra
from tests.integration.test_end_to_end import PROMPT
from tests.store.kit import eventually
from tests.store.peer.fleet_kit import Fleet, fleet_of
from tutti_sglang.cli.scrape import look

pytestmark = [pytest.mark.server, pytest.mark.matrix, pytest.mark.timeout(1500)]

PAGE = 64
WORKER = b"tutti_sglang.store.peer.worker"


def _workers(server: Server) -> list[int]:
    """Process ids of the ranks' workers."""
    return sorted(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_of(path, server))


def _is_of(path: Path, server: Server) -> bool:
    try:
        return WORKER in path.read_bytes().split(b"\0") and os.getsid(int(path.parent.name)) == server.process.pid
    except OSError:  # it ended
        return False


def _joined(server: Server) -> bool:
    return eventually(lambda: look(server.url).total("tutti_peer_in_service") == 2, 90)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(tmp_path / "mooncake") as fleet:
        fleet.lend("128MB")
        yield fleet


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Without a storage: the test attaches one store after another."""
    server = Server(Launch(flags=FLAGS, ranks=2), tmp_path / "server")
    yield server
    server.kill()


def test_two_ranks_restore_what_others_published_and_the_fleet_of_one_holds_up_no_prompt(
    server: Server, fleet: Fleet, disk: Path
) -> None:
    def attach(store: str, **changes: Any) -> None:
        peer = msgspec.to_builtins(fleet.peer(memory=64 << 20, timeout=5.0, **changes))
        settings = extra(disk / store, peer=peer, break_even="off")
        assert server.attach(settings, prefetch_policy="wait_complete")[0] == 200
        assert _joined(server)

    def ask(number: int) -> tuple[Reply, int]:
        """One prompt of many; the pages of it that can be stored."""
        reply = server.generate(f"{number}: {PROMPT}")
        return reply, (reply.prompt_tokens - 1) // PAGE

    def restored(number: int) -> int:
        """Pages that came; what is computed here is stored here, so a number is asked for once."""
        reply, pages = ask(number)
        assert reply.tokens == computed[number][0].tokens
        assert reply.storage in (0, pages * PAGE), "all ranks load it, or none"
        return reply.storage // PAGE

    attach("one")
    computed = [ask(number) for number in range(7)]
    pages = computed[0][1]
    published = {"op": "publish", "outcome": "stored"}
    wanted = 2 * sum(each for _, each in computed)
    assert eventually(lambda: look(server.url).total("tutti_peer_objects", **published) >= wanted, 60)
    server.flush()
    assert server.detach()[0] == 200
    attach("two", keep=False)
    assert restored(0) == pages
    first, last = _workers(server)
    os.kill(last, signal.SIGSTOP)
    assert restored(1) == 0, "one rank's fleet says nothing: all compute"
    os.kill(last, signal.SIGCONT)
    assert _joined(server)
    assert restored(2) == pages
    os.kill(first, signal.SIGKILL)
    restored(3)
    assert eventually(lambda: len(_workers(server)) == 2, 90)
    assert _joined(server)
    assert restored(4) == pages
    fleet.master.kill()
    assert restored(5) == restored(6) == 0
    metrics = look(server.url)
    assert metrics.total("tutti_call_errors") == 0
    assert metrics.total("tutti_peer_objects", op="get", outcome="wrong") == 0
    assert not server.tracebacks()
