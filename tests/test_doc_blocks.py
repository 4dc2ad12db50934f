"""Every block of code in the documents is run as far as a machine without a server or a GPU can run it."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tutti_sglang.config import ENV_PREFIX, Config, load_config
from tutti_sglang.store import ObjectStore

ROOT = Path(__file__).parent.parent
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
NOT_HERE = ("make", "pip", "docker", "sudo", "curl", "mooncake_master", "mooncake_client")
"""Commands that change the machine, or need what is not here; `make` is looked at in test_docs."""

ROUTER = "sglang_router.launch_router"
"""A package of its own."""


def _blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page, text)."""
    for page in PAGES:
        for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL):
            yield page.name, text


def _commands() -> list[tuple[str, tuple[str, ...]]]:
    found = []
    for page, text in _blocks("bash"):
        command = ""
        for line in text.replace("\\\n", " ").splitlines():
            command += line + " "
            if command.count("'") % 2:  # a quotation goes on in the next line
                continue
            words = tuple(shlex.split(command, comments=True))
            command = ""
            if words:
                found.append((page, words))
    return sorted(set(found))


COMMANDS = _commands()


def _of(*start: str) -> list[tuple[str, ...]]:
    return sorted({words for _, words in COMMANDS if words[: len(start)] == start})


def _shown(words: tuple[str, ...]) -> str:
    return " ".join(words)[:100]


def test_every_command_is_of_a_kind_that_is_run() -> None:
    assert len(COMMANDS) > 15
    for page, words in COMMANDS:
        assert words[0] in ("tutti", "python", *NOT_HERE), f"{page}: {words}"
        if words[0] == "python":
            assert words[1] == "-m"
            there = words[2] in ("sglang.launch_server", ROUTER) or words[2].startswith("benchmarks.")
            assert there, f"{page}: {words}"


@pytest.mark.parametrize("words", _of("tutti"), ids=_shown)
def test_the_command_line_is_run(words: tuple[str, ...], tmp_path: Path) -> None:
    store = tmp_path / "store"
    config = load_config({"storage_dirs": [str(store)], "max_size": "1GiB", "min_free_space": 0}, {}).config
    ObjectStore(config).close()
    there = [word.replace("/mnt/nvme0/tutti", str(store)).replace(":30000", ":1") for word in words[1:]]
    done = subprocess.run([sys.executable, "-m", "tutti_sglang.cli", *there], capture_output=True, text=True)
    nobody = "does not answer" in done.stderr  # a verb that asks a server
    assert done.returncode in (0, 1) or (done.returncode == 2 and nobody), done.stdout + done.stderr


@cache
def _help(*module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *module, "--help"], cwd=ROOT, capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words", [words for words in _of("python", "-m") if "sglang" not in words[2]], ids=_shown)
def test_a_benchmark_has_the_options_that_are_shown(words: tuple[str, ...]) -> None:
    module, rest = words[2], words[3:]
    verb = rest[:1] if rest and re.fullmatch("[a-z]+", rest[0]) else ()
    text = _help(module, *verb)
    for word in rest:
        if word.startswith("--"):
            assert re.search(rf"{word}\b", text), f"{module} has no {word}"


@pytest.mark.parametrize("words", _of("python", "-m", "sglang.launch_server"), ids=_shown)
def test_sglang_takes_the_launch_lines(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    from sglang.srt.server_args import ServerArgs

    from tutti_sglang.integration import flags

    flags._offer_choice()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(words[3:])
    assert given.hicache_storage_backend == "tutti"
    assert load_config(msgspec.json.decode(given.hicache_storage_backend_extra_config), {}).config.storage_dirs


def test_settings_in_json_are_settings() -> None:
    blocks = list(_blocks("json"))
    assert blocks
    for page, text in blocks:
        assert load_config(msgspec.json.decode(text), {}), page


def test_a_pods_variables_are_settings() -> None:
    blocks = [text for _, text in _blocks("yaml")]
    pods = [msgspec.yaml.decode(part) for text in blocks for part in text.split("\n---\n")]
    for pod in (each for each in pods if "containers" in each):  # other documents are of Mooncake's own
        variables = [each for container in pod["containers"] for each in container["env"]]
        names = {each["name"].removeprefix(ENV_PREFIX).lower() for each in variables}
        assert names <= set(Config.__struct_fields__)
        assert load_config({}, {each["name"]: each["value"] for each in variables})
    assert any("containers" in each for each in pods)
