"""A real server measures prefills and loads, loads what pays, computes the rest, and writes beside decode steps."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks import slow_disk
from tests.integration.server import Launch, Reply, Server, Servers, hicache
from tutti_sglang.config import load_config
from tutti_sglang.schedule.profiling import profile, saved_drives
from tutti_sglang.schedule.slack import Saved

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

SIZES = {"max_size": "1GiB", "segment_size": "16MiB", "min_free_space": "64MiB", "staging_size": "64MiB"}
SLOW = 20_000
"""Nanoseconds a byte: 50 kB/s."""


class Slowable:
    """A store whose reads can be made slow."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.slow = folder / "nanoseconds a byte"
        slow_disk.install(folder / "plugin")
        environ = (("PYTHONPATH", str(folder / "plugin")), (slow_disk.VARIABLE, str(self.slow)))
        extra = {"storage_dirs": [str(self.store)], **SIZES}
        flags = hicache("tutti", "--enable-metrics", "--log-level", "debug", extra=extra)
        flags += ("--hicache-storage-prefetch-policy", "wait_complete")
        self.launch = Launch(flags=flags, environ=environ)

    def table(self) -> Saved:
        """What the server has saved of its steps."""
        (path,) = (self.store / "profiles").glob("*.json")
        return msgspec.json.decode(path.read_bytes(), type=Saved)


@pytest.fixture(scope="module")
def world(drive: Path) -> Iterator[Slowable]:
    folder = drive / "scheduling"
    folder.mkdir()
    yield Slowable(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _prompt(number: int, tokens: int) -> list[int]:
    return [32 + (number * 7919 + place * 31 + place * place) % 95 for place in range(tokens)]


def _twice(server: Server, number: int, tokens: int) -> tuple[Reply, Reply]:
    """Computed, stored, and asked for again."""
    first = server.generate(_prompt(number, tokens), 4)
    server.flush()
    return first, server.generate(_prompt(number, tokens), 4)


def test_what_pays_is_loaded_and_what_does_not_is_computed(servers: Servers, world: Slowable) -> None:
    server = servers.get(world.launch)
    for number, tokens in enumerate((200, 700, 1500, 3000)):  # it learns what prefills and loads take
        first, again = _twice(server, number, tokens)
        assert again.tokens == first.tokens
        assert again.storage >= (tokens - 1) // 64 * 64 - 64
    before = server.metric("tutti_break_even_requests_total", outcome="load")
    first, again = _twice(server, 10, 2000)
    assert again.tokens == first.tokens
    assert again.storage > 1800
    assert server.metric("tutti_break_even_requests_total", outcome="load") > before

    world.slow.write_text(str(SLOW))
    for number in (20, 21, 22):  # it is told what loads take now
        _twice(server, number, 300)
    first, again = _twice(server, 30, 2000)
    assert again.tokens == first.tokens
    assert again.storage < again.prompt_tokens // 2  # a page that is only tried may be among them
    assert server.metric("tutti_declined_objects_total") > 0
    assert re.search(
        r"break-even of \w+: (recompute|part): \d+ pages: .* ms \(all of them .* ms, none .* ms\)", server.log_text()
    )
    world.slow.unlink()


def test_steps_are_followed_and_writes_have_their_window(servers: Servers, world: Slowable) -> None:
    server = servers.get(world.launch)
    server.generate(_prompt(40, 500), 32)
    server.flush()
    metrics = server.call("/metrics")
    assert server.metric("tutti_step_seconds_total", mode="prefill") > 0
    assert server.metric("tutti_step_seconds_total", mode="decode") > 0
    assert server.metric("tutti_write_turns_total", reason="window") > 0
    assert "not followed any more" not in server.log_text()
    for line in metrics.splitlines():
        if line.startswith("tutti_call_errors_total"):
            assert float(line.split()[-1]) == 0, line


def test_what_was_measured_is_found_again_at_the_next_start(servers: Servers, world: Slowable) -> None:
    server = servers.get(world.launch)
    server.generate(_prompt(50, 500), 4)
    server.flush()
    saved = world.table()
    assert saved.identity["sglang"]
    assert sum(len(cell.seconds) for cell in saved.cells) >= 8
    server.restart()
    assert "prefill times of this model and device are known" in server.log_text()


def test_a_profile_of_the_running_server_is_in_its_table(servers: Servers, world: Slowable) -> None:
    server = servers.get(world.launch)
    told: list[tuple[int, int]] = []
    config = load_config({"storage_dirs": [str(world.store)], "engine": "threads", **SIZES}, {}).config
    found = profile(
        server.url,
        config,
        lambda done, total, what: told.append((done, total)),
        new=(64, 512),
        prefix=(0, 256),
        rounds=1,
    )
    assert told == [(done, 9) for done in range(10)]
    assert found.path.parent == world.store / "profiles"
    assert found.table.identity["device"].startswith("CPU")
    assert any(cell.beside for cell in found.table.cells)
    shapes = [(new, prefix) for new in (64, 512) for prefix in (0, 256)]
    for new, prefix in shapes:
        cells = [c for c in found.table.cells if abs(c.new - new) <= 64 and abs(c.prefix - prefix) <= 64]
        assert cells, (new, prefix, found.table.cells)
    assert saved_drives(found.path.parent) == found.drives
