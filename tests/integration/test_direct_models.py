"""Real servers of other models on the direct path: latent rows, a sliding window, a state beside attention. What was
computed comes back after a flush and after a restart, and the host path reads it too."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.matrix import ENVIRON, HYBRID, MLA, SHAPES, TOKENS, WINDOW
from tests.integration.server import Launch, Reply, Server, Servers, hicache
from tests.integration.stores import extra
from tests.integration.test_models import PROMPTS
from tutti_sglang.cli.scrape import look
from tutti_sglang.integration.cpu_model import built_in_model

pytestmark = [pytest.mark.server, pytest.mark.matrix, pytest.mark.timeout(1500)]

PAGE = 64


def _launch(model: str, store: Path, ranks: int, path: str) -> Launch:
    flags = ["--page-size", str(PAGE), "--max-total-tokens", str(TOKENS), "--enable-metrics"]
    flags += ["--max-mamba-cache-size", "64"] if SHAPES[model].state else []
    settings = extra(store, path=path, break_even="off", prefetch_timeout_base=100)
    model_path = built_in_model(shape=SHAPES[model])
    return Launch(flags=hicache("tutti", *flags, extra=settings), model=model_path, environ=ENVIRON, ranks=ranks)


def _come_back(server: Server, prompts: list[Any], cold: list[Reply]) -> None:
    for prompt, first in zip(prompts, cold, strict=True):
        again = server.generate(prompt)
        assert again.tokens == first.tokens
        assert again.device == again.host == 0
        assert again.storage > first.prompt_tokens // 2
    metrics = look(server.url)
    assert metrics.total("tutti_call_errors") == 0
    assert metrics.total("tutti_load_requests", outcome="failed") == 0


@pytest.mark.parametrize(("model", "ranks"), [(MLA, 1), (WINDOW, 1), (HYBRID, 1), (HYBRID, 2)])
def test_what_was_computed_comes_back_by_either_path(servers: Servers, disk: Path, model: str, ranks: int) -> None:
    # Of a prompt of whole pages the last one is computed; SGLang offers a state before it to a host tier alone.
    prompts = PROMPTS[:2] if SHAPES[model].state else PROMPTS
    server = servers.get(_launch(model, disk / "store", ranks, "direct"))
    cold = [server.generate(each) for each in prompts]
    assert all(reply.storage == 0 for reply in cold)
    assert len({reply.tokens for reply in cold}) == len(prompts)
    server.flush()
    _come_back(server, prompts, cold)
    server.restart()
    _come_back(server, prompts, cold)
    assert look(server.url).total("tutti_load_pages") > 0
    _come_back(servers.get(_launch(model, disk / "store", ranks, "host")), prompts, cold)
    servers.close()
