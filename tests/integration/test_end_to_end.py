"""Real SGLang servers on the CPU platform: what they computed once comes back from the disk, and nothing else does."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import plugins, recorder
from tests.integration.recorder import VARIABLE, recorded
from tests.integration.server import ADMIN, Launch, Servers, hicache
from tests.integration.stores import extra, from_storage, objects, wait_for_objects
from tests.store.kit import eventually
from tutti_sglang.integration.cpu_model import Shape, built_in_model, write_model
from tutti_sglang.integration.cpu_server import cpu_environment, cpu_flags, write_site

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

NAME = "one-name"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
PROMPT = TEXT * 8
SERVE = ("-c", "from sglang.cli.main import main; main()", "serve")
"""What the `sglang serve` script runs, wherever pip has put it."""


class World:
    """What the servers of this file share: a store, a model in a folder, a record of all pages that were moved."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.model = folder / "model"
        self.model.mkdir()
        write_model(self.model)
        self.record = folder / "record.jsonl"
        self.record.touch()
        plugins.install(folder / "recorder", recorder)
        self.environ = (("PYTHONPATH", str(folder / "recorder")), (VARIABLE, str(self.record)))

    def launch(self, *flags: str, **changed: Any) -> Launch:
        """A server with the tier on this store."""
        named = ("--served-model-name", NAME)
        plain = {"model": self.model, "environ": self.environ, "flags": hicache("tutti", *named, *flags)}
        plain["flags"] = hicache("tutti", *named, *flags, extra=extra(self.store))
        return Launch(**(plain | changed))

    def objects(self) -> int:
        """Objects in the index, read by another process than the server's."""
        return objects(self.store)

    def wait_for_objects(self, count: int) -> None:
        """Until so many are there."""
        wait_for_objects(self.store, count)

    def drop_page_cache(self) -> None:
        """Nothing of the store's files stays in memory."""
        for file in self.store.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


@pytest.fixture(scope="module")
def world(drive: Path) -> Iterator[World]:
    folder = drive / "end-to-end"
    folder.mkdir()
    yield World(folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_what_was_computed_survives_flush_kill_and_restart_byte_for_byte(servers: Servers, world: World) -> None:
    server = servers.get(world.launch("--enable-metrics"))
    first = server.generate(PROMPT)
    assert first.storage == 0
    server.flush()
    world.drop_page_cache()
    from_storage(server.generate(PROMPT), first)
    before = world.objects()
    second = server.generate("Once more: " + PROMPT)
    world.wait_for_objects(before + second.prompt_tokens // 64)
    assert eventually(lambda: server.metric("sglang:backup_pgs_sum") == world.objects()), "each page once"
    server.kill()  # SIGKILL: no close(), no flush
    world.drop_page_cache()
    server.start()
    again = server.generate_many([PROMPT, "Once more: " + PROMPT])
    from_storage(again[0], first)
    from_storage(again[1], second)
    written, read = recorded(world.record, "batch_set_v1"), recorded(world.record, "batch_get_v1")
    assert len(read) >= 20
    assert all(read[key] == written[key] for key in read)
    restored = sum(reply.storage for reply in again)
    assert server.metric("sglang:cached_tokens_total", cache_source="storage") == restored
    assert server.metric("sglang:prefetched_tokens_total") == server.metric("sglang:prefetch_pgs_sum") * 64 >= restored
    assert server.metric("tutti_hit_objects_total", tier="drive") * 64 >= restored
    assert server.metric("tutti_call_errors_total") == 0


def test_pages_that_a_disk_spoiled_are_computed_again(servers: Servers, world: World) -> None:
    server = servers.get(world.launch("--enable-metrics"))
    first = server.generate(PROMPT)
    world.wait_for_objects(first.prompt_tokens // 64)
    server.flush()
    for file in (world.store / "segments").glob("*.seg"):
        with open(file, "r+b", buffering=0) as handle:
            for at in range(0, file.stat().st_size, 48 << 10):
                byte = os.pread(handle.fileno(), 1, at)
                os.pwrite(handle.fileno(), bytes([byte[0] ^ 1]), at)
    world.drop_page_cache()
    again = server.generate(PROMPT)
    assert again.tokens == first.tokens
    assert again.storage < first.prompt_tokens // 64 * 64 - 64, "nothing was spoiled"
    spoiled = re.search(r'tutti_missed_objects_total{reason="checksum"} (\S+)', server.call("/metrics"))
    assert spoiled
    assert float(spoiled[1]) > 0
    world.wait_for_objects(first.prompt_tokens // 64)
    server.flush()
    from_storage(server.generate(PROMPT), first)


def test_other_weights_saved_over_the_same_path_find_nothing(servers: Servers, world: World) -> None:
    server = servers.get(world.launch("--enable-metrics"))
    first = server.generate(PROMPT)
    server.flush()
    from_storage(server.generate(PROMPT), first)
    server.stop()
    assert not list((world.store / "owners").iterdir()), "SIGTERM closes the store before host memory goes"
    write_model(world.model, seed=1)
    server.start()
    try:
        other = server.generate(PROMPT)
        assert other.storage == 0
        assert other.tokens != first.tokens
        server.flush()
        from_storage(server.generate(PROMPT), other)
    finally:
        write_model(world.model, seed=0)
        servers.close()


def _seed(servers: Servers, world: World) -> None:
    """The prompt's pages of the first model, under NAME, are in the store."""
    if not (world.store / "index.db").exists() or not world.objects():
        server = servers.get(world.launch("--enable-metrics"))
        server.generate(PROMPT)
        server.flush()
        servers.close()
    assert world.objects() > 0


def _dynamic(world: World, model: Path) -> Launch:
    route = {"backend_name": "tutti", "module_path": "tutti_sglang.integration.hicache", "allocator": "default"}
    settings = extra(world.store, class_name="TuttiHiCacheStorage", **route)
    flags = ("--served-model-name", NAME, "--hicache-host-memory-mode", "buffer_only", *ADMIN)
    return Launch(model=model, environ=world.environ, flags=hicache("dynamic", *flags, extra=settings))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KV of the same shape, another network."""
    return built_in_model(tmp_path_factory.mktemp("models"), seed=3, shape=Shape(intermediate=512))


def test_another_model_under_the_same_name_finds_nothing_by_the_dynamic_route_without_a_host_cache(
    servers: Servers, world: World, other_model: Path
) -> None:
    _seed(servers, world)
    server = servers.get(_dynamic(world, other_model))
    first = server.generate(PROMPT)
    assert first.storage == 0
    server.flush()
    from_storage(server.generate(PROMPT), first)
    again = server.generate(PROMPT)
    assert (again.host, again.tokens) == (0, first.tokens), "host memory is a buffer only"


def test_new_weights_while_serving_find_nothing(servers: Servers, world: World, other_model: Path) -> None:
    server = servers.get(_dynamic(world, other_model))
    before = server.generate(PROMPT)
    newer = built_in_model(other_model.parent, seed=4, shape=Shape(intermediate=512))
    status, text = server.ask("POST", "/update_weights_from_disk", {"model_path": str(newer)})
    assert status == 200, text
    after = server.generate(PROMPT)
    assert after.storage == 0
    assert after.tokens != before.tokens
    server.flush()
    from_storage(server.generate(PROMPT), after)
    assert server.detach()[0] == 200
    assert server.attach(extra(world.store))[0] == 200
    server.flush()
    from_storage(server.generate(PROMPT), after)  # known by the files that were read, not by those of the launch


def test_detach_and_attach_while_serving_with_the_messages_of_a_bad_store(
    servers: Servers, world: World, other_model: Path, drive: Path
) -> None:
    server = servers.get(_dynamic(world, other_model))
    assert server.detach() == (
        200,
        "HiCache storage backend detached.\nDetached HiCache storage backend successfully.\n",
    )
    (drive / "photos").mkdir()
    (drive / "photos" / "one.jpg").write_bytes(b"x")
    (drive / "file").write_bytes(b"x")
    for settings, message in (
        ({"storage_dir": "/x"}, "Did you mean 'storage_dirs'?"),
        (extra(drive / "photos"), "photos"),
        (extra(drive / "file"), "file"),
        (extra(drive / "small", min_free_space="900TiB"), "min_free_space"),
    ):
        status, text = server.attach(settings)
        assert status == 400
        assert message in text
    settings = extra(world.store)
    assert server.attach(settings)[0] == 200
    server.flush()
    first = server.generate("Attached again. " + PROMPT)
    server.flush()
    from_storage(server.generate("Attached again. " + PROMPT), first)
    assert server.ask("POST", "/hicache/storage-backend/clear")[0] == 200
    server.flush()
    assert server.generate("Attached again. " + PROMPT).storage == 0


def test_two_tensor_parallel_ranks_each_get_their_own_half(servers: Servers, world: World) -> None:
    world.record.write_text("")
    server = servers.get(world.launch(ranks=2, entry=SERVE))
    first = server.generate(PROMPT)
    assert first.storage == 0, "pages of one rank are other objects"
    server.flush()
    from_storage(server.generate(PROMPT), first)
    written, read = recorded(world.record, "batch_set_v1"), recorded(world.record, "batch_get_v1")
    assert len(read) >= 10
    assert all(read[key] == written[key] and len(read[key]) == 2 for key in read)
    servers.close()


ENGINE = """
import json, sys, time
import sglang

def main():
    engine = sglang.Engine(**json.loads(sys.argv[1]))
    def ask():
        answer = engine.generate(sys.argv[2], {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True})
        return answer["output_ids"], answer["meta_info"]["prompt_tokens"], answer["meta_info"]["cached_tokens_details"]
    first = ask()
    deadline = time.monotonic() + 60
    while not engine.flush_cache().success:  # refused while pages are being written
        assert time.monotonic() < deadline
        time.sleep(0.2)
    print("RESULT" + json.dumps([first, ask()]), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def _keywords(flags: list[str]) -> dict[str, Any]:
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {name[2:].replace("-", "_"): int(value) if value.isdigit() else value for name, value in pairs}


def test_the_engine_api_with_pages_of_one_token_and_the_layer_first_layout(
    servers: Servers, world: World, tmp_path: Path
) -> None:
    servers.close()
    keywords = {
        **_keywords(cpu_flags()),
        "model_path": str(world.model),
        "page_size": 1,
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "tutti",
        "hicache_mem_layout": "layer_first",
        "hicache_io_backend": "direct",
        "hicache_storage_backend_extra_config": json.dumps(extra(world.store)),
    }
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(keywords), TEXT * 2],
        env=cpu_environment(os.environ | {"HF_HUB_OFFLINE": "1"}, write_site(tmp_path / "site")),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert "RESULT" in done.stdout, done.stderr[-4000:]
    (tokens, _, _), (again, prompt, cached) = json.loads(done.stdout.split("RESULT")[1].splitlines()[0])
    assert again == tokens
    assert cached["storage"] >= prompt - 2


@pytest.mark.parametrize("entry", [("-m", "sglang.launch_server"), SERVE], ids=["launch_server", "serve"])
def test_a_store_that_cannot_be_ends_the_launch_with_a_line_that_says_what_to_do(
    entry: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("do not touch")
    flags = hicache("tutti", extra=extra(foreign))
    done = subprocess.run(
        [sys.executable, *entry, "--model-path", str(world.model), *cpu_flags(), *flags],
        env=cpu_environment(os.environ | {"HF_HUB_OFFLINE": "1"}, write_site(tmp_path / "site")),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1] == (
        f"tutti: {foreign} is not a store and not empty (it holds thesis.tex). "
        f"Name an empty or new directory, as in {foreign}/tutti"
    )
    assert [file.name for file in foreign.iterdir()] == ["thesis.tex"]
