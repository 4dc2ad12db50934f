"""Real SGLang servers on the direct path: what was computed once is loaded layer by layer, whoever stored it."""

import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.server import Launch, Servers, hicache
from tests.integration.stores import extra, from_storage
from tests.integration.test_end_to_end import PROMPT

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

LONG = "A long one. " + PROMPT * 3
"""More than one chunk of CHUNK tokens. No two prompts here begin alike: the one would find the other on the device."""
CHUNK = ("--chunked-prefill-size", "1024")


@pytest.fixture(scope="module")
def store(drive: Path) -> Iterator[Path]:
    yield drive / "direct" / "store"
    shutil.rmtree(drive / "direct", ignore_errors=True)


def direct(store: Path, *flags: str, ranks: int = 1) -> Launch:
    """A server with the direct path."""
    settings = extra(store, path="direct", break_even="off")
    return Launch(flags=hicache("tutti", "--enable-metrics", *CHUNK, *flags, extra=settings), ranks=ranks)


def by_name(backend: str, config: dict[str, object], *flags: str, ranks: int = 1) -> Launch:
    """The same through SGLang's own flags of an external linker."""
    named = ("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", backend)
    settings = ("--unified-cache-external-linker-config", json.dumps(config))
    return Launch(flags=(*named, *settings, "--enable-metrics", *CHUNK, *flags), ranks=ranks)


def _sum(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.M))


def test_both_paths_load_what_either_stored_with_chunks_batches_and_aborts(servers: Servers, store: Path) -> None:
    host = servers.get(Launch(flags=hicache("tutti", "--enable-metrics", extra=extra(store))))
    told = host.generate("Told by the host path. " + PROMPT)
    host.flush()
    server = servers.get(direct(store))  # the other one was killed
    from_storage(server.generate("Told by the host path. " + PROMPT), told)
    prompts = [PROMPT, LONG, "Once more: " + PROMPT]
    first = [server.generate(prompt) for prompt in prompts]
    assert all(reply.storage == 0 for reply in first)
    server.flush()
    for again, before in zip(server.generate_many(prompts), first, strict=True):  # loads of one batch
        from_storage(again, before)
    server.flush()
    _abort_while_waiting(server.url, prompts)
    server.flush()
    for prompt, before in zip(prompts, first, strict=True):
        from_storage(server.generate(prompt), before)
    metrics = server.call("/metrics")
    assert _sum(metrics, "tutti_call_errors_total") == 0
    assert _sum(metrics, 'tutti_load_requests_total{outcome="failed"}') == 0
    assert _sum(metrics, 'tutti_load_pages_total{source="staged"}') > 0
    assert _sum(metrics, 'tutti_preload_bytes{kind="used"}') == 0
    host = servers.get(Launch(flags=hicache("tutti", "--enable-metrics", extra=extra(store))))
    for prompt, before in zip(prompts, first, strict=True):
        from_storage(host.generate(prompt), before)


def _abort_while_waiting(url: str, prompts: list[str]) -> None:
    """Clients that leave at once, at any point of their request's way."""

    def leave(prompt: str, seconds: float) -> None:
        data = json.dumps({"text": prompt}).encode()
        request = urllib.request.Request(url + "/generate", data, {"Content-Type": "application/json"})
        with pytest.raises((TimeoutError, urllib.error.URLError)):
            urllib.request.urlopen(request, timeout=seconds)

    threads = [threading.Thread(target=leave, args=(prompts[n % 3], 0.01 + 0.03 * n)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_ranks_without_overlap_load_their_own_halves(servers: Servers, store: Path) -> None:
    server = servers.get(by_name("tutti", extra(store, break_even="off"), "--disable-overlap-schedule", ranks=2))
    first = server.generate(LONG)
    assert first.storage == 0, "pages of one rank are other objects"
    server.flush()
    from_storage(server.generate(LONG), first)
    server.flush()
    many = server.generate_many([LONG, "Twice. " + LONG])
    from_storage(many[0], first)
    servers.close()


@pytest.mark.matrix
def test_a_server_that_loads_the_linker_by_its_module_serves_what_the_others_stored(
    servers: Servers, store: Path
) -> None:
    told = servers.get(direct(store)).generate("Told by name. " + PROMPT)
    module = {"linker": "TuttiLinker", "linker_module_path": "tutti_sglang.integration.linker"}
    server = servers.get(by_name("dynamic", {**module, "linker_extra_config": extra(store, break_even="off")}))
    from_storage(server.generate("Told by name. " + PROMPT), told)
    new = server.generate("Told to the module. " + PROMPT)
    server.flush()
    from_storage(server.generate("Told to the module. " + PROMPT), new)
    assert _sum(server.call("/metrics"), "tutti_call_errors_total") == 0
    servers.close()
