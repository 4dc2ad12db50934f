"""Two real servers of a fleet, one on each path, with stores of their own: a conversation goes on wherever it lands."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.integration.server import Launch, Server, hicache
from tests.integration.stores import extra
from tests.integration.test_end_to_end import PROMPT
from tests.store.kit import eventually
from tests.store.peer.fleet_kit import Fleet, fleet_of

pytestmark = [pytest.mark.server, pytest.mark.matrix, pytest.mark.timeout(1500)]

PAGE = 64


class Two:
    """Server `host` and server `direct`, and what they share."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.host = Server(self._launch(folder / "one", "host"), folder / "host")
        try:
            self.direct = Server(self._launch(folder / "two", "direct"), folder / "direct")
        except BaseException:
            self.host.kill()
            raise

    def _launch(self, store: Path, path: str) -> Launch:
        peer = msgspec.to_builtins(self.fleet.peer(memory=64 << 20, timeout=5.0))
        # Nobody measures here: all that can be had is loaded, whatever a busy machine makes of it.
        settings = extra(store, path=path, peer=peer, break_even="off")
        return Launch(flags=hicache("tutti", "--enable-metrics", extra=settings))

    def close(self) -> None:
        for server in (self.host, self.direct):
            server.kill()


@pytest.fixture(scope="module")
def two(drive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with fleet_of(tmp_path_factory.mktemp("mooncake")) as fleet:
        fleet.lend("128MB")
        pair = Two(fleet, drive / "fleet")
        yield pair
        pair.close()


def _metric(server: Server, name: str) -> float:
    lines = [line for line in server.call("/metrics").splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _published(server: Server, pages: int) -> bool:
    return eventually(lambda: _metric(server, 'tutti_peer_objects_total{op="publish",outcome="stored"') >= pages, 60)


def _serves(server: Server) -> bool:
    return eventually(lambda: _metric(server, "tutti_peer_in_service") == 1, 60)


def test_a_conversation_goes_on_at_another_server_with_equal_tokens(two: Two) -> None:
    host, direct = two.host, two.direct
    assert _serves(host)
    assert _serves(direct)
    first = host.generate(PROMPT)
    pages = (first.prompt_tokens - 1) // PAGE
    assert first.storage == 0
    assert _published(host, pages)
    moved = direct.generate(PROMPT)
    assert moved.tokens == first.tokens
    assert moved.storage >= (pages - 1) * PAGE
    # It goes on there, and comes back: what it grew by is all that has to travel.
    longer = PROMPT + first.text + " And then? " + PROMPT
    second = direct.generate(longer)
    grown = (second.prompt_tokens - 1) // PAGE
    assert _published(direct, grown - pages - 1)
    host.flush()
    back = host.generate(longer)
    assert back.tokens == second.tokens
    assert back.storage >= (grown - 2) * PAGE
    for server in (host, direct):
        assert _metric(server, "tutti_call_errors_total") == 0
        assert _metric(server, 'tutti_hit_objects_total{tier="peer"') > 0
        assert _metric(server, 'tutti_peer_objects_total{op="get",outcome="wrong"') == 0


def test_what_arrived_is_kept_and_served_without_the_fleet(two: Two) -> None:
    two.fleet.master.kill()
    for server in (two.host, two.direct):
        server.flush()
        again = server.generate(PROMPT)
        assert again.storage >= (again.prompt_tokens - 1) // PAGE * PAGE - PAGE
        computed = server.generate("Nobody has this one. " + PROMPT)
        assert computed.storage == 0
        assert server.call("/health") is not None
