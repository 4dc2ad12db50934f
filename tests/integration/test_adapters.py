"""Adapters (LoRA), salts and keys of requests: each finds its own KV in the store, and none another's."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.administrator import prompt
from tests.integration.server import Launch, Server, Servers, hicache
from tests.integration.stores import extra, from_storage
from tutti_sglang.integration.cpu_model import Shape

pytestmark = [pytest.mark.server, pytest.mark.matrix, pytest.mark.timeout(1500)]

RANK = 4
PROMPT = prompt(2000, 300)
NOBODY: dict[str, Any] = {}
FLAGS = ("--lora-backend", "torch_native", "--max-lora-rank", str(RANK), "--lora-target-modules", "q_proj", "v_proj")


def _write_adapter(folder: Path, seed: int) -> None:
    """One that changes every answer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(kind | {"r": RANK, "lora_alpha": 4 * RANK}))
    random, shape, weights = np.random.RandomState(seed), Shape(), {}
    for layer, (name, heads) in itertools.product(
        range(shape.layers), (("q_proj", shape.heads), ("v_proj", shape.kv_heads))
    ):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}."
        rows = heads * shape.head_dim
        weights[prefix + "lora_A.weight"] = random.standard_normal((RANK, shape.hidden)).astype(np.float32) / 16
        weights[prefix + "lora_B.weight"] = random.standard_normal((rows, RANK)).astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")


class World:
    """A server with the adapter `static` from its launch; others come from the folder `coming`."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.coming = folder / "coming"
        for seed, name in enumerate(("static", "coming")):
            _write_adapter(folder / name, seed)
        flags = ("--enable-lora", "--lora-paths", f"static={folder / 'static'}", *FLAGS)
        flags += ("--hicache-storage-prefetch-policy", "wait_complete")
        self.server: Server = servers.get(Launch(flags=hicache("tutti", *flags, extra=extra(folder / "store"))))

    def load(self) -> None:
        """The adapter `coming`, from its folder as it is now."""
        body = {"lora_name": "coming", "lora_path": str(self.coming)}
        assert json.loads(self.server.call("/load_lora_adapter", body))["success"]

    def unload(self) -> None:
        """The adapter `coming`."""
        assert json.loads(self.server.call("/unload_lora_adapter", {"lora_name": "coming"}))["success"]


@pytest.fixture(scope="module")
def world(servers: Servers, drive: Path) -> Iterator[World]:
    yield World(servers, drive / "adapters")
    servers.close()


def test_each_adapter_finds_its_own_pages(world: World) -> None:
    server = world.server
    world.load()
    who = [NOBODY, {"lora_path": "static"}, {"lora_path": "coming"}]
    first = [server.generate(PROMPT, **each) for each in who]
    assert all(reply.storage == reply.host == reply.device == 0 for reply in first)
    assert len({reply.tokens for reply in first}) == len(who)
    server.flush()
    for each, before in zip(who, first, strict=True):
        from_storage(server.generate(PROMPT, **each), before)


def test_an_adapter_under_a_name_that_was_in_use_finds_nothing(world: World) -> None:
    server = world.server
    coming = {"lora_path": "coming"}
    before = server.generate(PROMPT, **coming)
    world.unload()
    _write_adapter(world.coming, seed=2)
    world.load()
    server.flush()
    after = server.generate(PROMPT, **coming)
    assert after.storage == 0
    assert after.tokens != before.tokens
    server.flush()
    from_storage(server.generate(PROMPT, **coming), after)


def test_salts_and_keys_of_requests_share_nothing(world: World) -> None:
    server, mine = world.server, prompt(2001, 300)
    who = [NOBODY, {"cache_salt": "x"}, {"cache_salt": "y"}, {"extra_key": "x"}, {"cache_salt": "x", "extra_key": "x"}]
    first = [server.generate(mine, **each) for each in who]
    assert all(reply.storage == reply.host == reply.device == 0 for reply in first)
    assert len({reply.tokens for reply in first}) == 1
    server.flush()
    for each, before in zip(who[1:3], first[1:3], strict=True):
        from_storage(server.generate(mine, **each), before)
    server.flush()
    assert server.generate(mine, cache_salt="z").storage == 0
    assert server.generate(mine, extra_key="y", lora_path="static").storage == 0


def test_after_a_restart_the_launchs_adapter_finds_its_pages_and_one_that_came_later_none(world: World) -> None:
    server = world.server
    who = [NOBODY, {"lora_path": "static"}, {"lora_path": "coming"}]
    server.flush()
    first = [server.generate(PROMPT, **each) for each in who]
    server.restart()
    world.load()
    for each, before in zip(who[:2], first[:2], strict=True):
        from_storage(server.generate(PROMPT, **each), before)
    again = server.generate(PROMPT, **who[2])
    assert again.storage == 0, "SGLang gives it a new identity each time"
    assert again.tokens == first[2].tokens
