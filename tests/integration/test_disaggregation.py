"""A prefill server and a decode server on one store, KV sent from one to the other by SGLang over TCP."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import plugins, unpinned
from tests.integration.administrator import prompt
from tests.integration.server import Launch, Reply, Server, Servers, hicache
from tests.integration.stores import extra, wait_for_objects
from tutti_sglang.integration.launch import free_port

pytest.importorskip("mooncake", reason="no way from server to server: mooncake is not installed")

pytestmark = [pytest.mark.server, pytest.mark.matrix, pytest.mark.timeout(1500)]

ENVIRON = (("MC_FORCE_TCP", "1"), ("MOONCAKE_PROTOCOL", "tcp"), ("SGLANG_HICACHE_DECODE_OFFLOAD_STRIDE", "16"))
NORMAL = "--disable-overlap-schedule"  # with overlap the prefill server waits for events of a GPU


class Pair:
    """Both servers, and a client that stands for the router."""

    def __init__(self, folder: Path) -> None:
        self.store, self.port, self.rooms = folder / "store", free_port(), 0
        plugins.install(folder / "plugin", unpinned)
        self._environ = (*ENVIRON, ("PYTHONPATH", str(folder / "plugin")))
        prefill = hicache("tutti", "--hicache-storage-prefetch-policy", "wait_complete", extra=extra(self.store))
        decode = (*hicache("tutti", extra=extra(self.store))[1:], "--disaggregation-decode-enable-offload-kvcache")
        self.prefill = Server(self._launch("prefill", *prefill, NORMAL), folder / "prefill")
        self.decode = Server(self._launch("decode", *decode, "--hicache-ratio", "2"), folder / "decode")

    def _launch(self, mode: str, *flags: str) -> Launch:
        flags += ("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake")
        flags += ("--disaggregation-bootstrap-port", str(self.port), "--page-size", "16")
        return Launch(flags, environ=self._environ)

    def ask(self, tokens: list[int], number: int) -> tuple[Reply, Reply]:
        """What the prefill server says of the prompt, and the reply of `number` tokens of the decode server."""
        self.rooms += 1
        place: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port}
        place["bootstrap_room"] = self.rooms
        replies: list[Reply] = []
        thread = threading.Thread(target=lambda: replies.append(self.prefill.generate(tokens, number, **place)))
        thread.start()
        reply = self.decode.generate(tokens, number, **place)
        thread.join()
        return replies[0], reply

    def close(self) -> None:
        """Kill both."""
        self.prefill.kill()
        self.decode.kill()


@pytest.fixture(scope="module")
def pair(servers: Servers, drive: Path) -> Iterator[Pair]:
    servers.close()
    pair = Pair(drive / "disaggregation")
    yield pair
    pair.close()


def test_what_either_server_computed_is_restored_by_the_prefill_server(pair: Pair) -> None:
    """SGLang's own check of decode offload, turn by turn: the reply of the one is the prompt of the next."""
    talk = prompt(1, 300)
    cold, reply = pair.ask(talk, 80)
    assert cold.storage == 0
    assert len(reply.tokens) == 80
    pair.prefill.flush()
    again, same = pair.ask(talk, 80)
    assert same.tokens == reply.tokens
    assert again.storage == (len(talk) - 1) // 16 * 16
    talk = [*talk, *reply.tokens]
    wait_for_objects(pair.store, (len(talk) - 1) // 16)
    pair.prefill.flush()
    further, _ = pair.ask([*talk, ord("?")], 8)
    assert further.storage >= (len(talk) - 1) // 16 * 16 - 16, "the decode server's pages follow the prefill server's"
