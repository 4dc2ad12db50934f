"""SGLang's own fault and delay injector around the tier of a real server: no wrong token, no hang, no restart."""

import threading
from pathlib import Path

import pytest

from tests.integration.administrator import attach, prompt, when_idle
from tests.integration.server import ADMIN, Launch, Reply, Server, Servers, hicache
from tests.integration.stores import extra

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

REQUESTS, ROUND, PROMPTS, USERS = 200, 20, 16, 4
INJECTED = (
    ("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.2"),  # seconds at most, before each call
    ("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2"),  # of the calls
)


@pytest.fixture(scope="module")
def store(drive: Path) -> Path:
    return drive / "injected" / "store"


@pytest.fixture
def server(servers: Servers, store: Path) -> Server:
    flags = ("--enable-metrics", "--hicache-storage-prefetch-policy", "wait_complete", *ADMIN)
    return servers.get(Launch(flags=hicache("tutti", *flags, extra=extra(store)), environ=INJECTED))


def test_two_hundred_requests_get_the_right_tokens_and_an_end(server: Server) -> None:
    known = [server.generate(prompt(each, 260), 8) for each in range(PROMPTS)]
    replies: list[tuple[int, Reply]] = []

    def use(requests: range) -> None:
        for request in requests:
            each = request * 5 % PROMPTS
            replies.append((each, server.generate(prompt(each, 260), 8)))

    for first in range(0, REQUESTS, ROUND):
        server.flush()  # between the rounds: SGLang refuses it while anybody is served
        threads = [
            threading.Thread(target=use, args=(range(first + user, first + ROUND, USERS),)) for user in range(USERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(replies) == REQUESTS
    assert all(reply.tokens == known[each].tokens for each, reply in replies)
    assert any(reply.storage for _, reply in replies)
    assert "HiCache storage test injector enabled" in server.log_text()


def test_a_backend_that_is_detached_while_it_writes_and_reads_loses_nothing_wrongly(
    server: Server, store: Path
) -> None:
    before = len(server.tracebacks())  # SGLang's own: it may ask itself to freeze_gc before its port is open
    for number in range(100, 110):
        first = server.generate(prompt(number, 520), 8)  # its pages are on their way to the store
        status, text = server.detach()
        assert status == 200 or "not idle" in text
        when_idle(server.detach)
        attach(server, store)
        server.flush()
        again = server.generate(prompt(number, 520), 8)
        assert again.tokens == first.tokens
    assert not server.tracebacks()[before:]
