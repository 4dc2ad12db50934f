"""An administrator of a server on the CPU platform, who attaches and detaches its storage."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.server import ADMIN, Launch, Server
from tests.integration.stores import extra

IDLE_SECONDS = 60.0
FLAGS = ("--enable-hierarchical-cache", "--page-size", "64", "--enable-metrics", *ADMIN)
CHECKPOINT_ENGINE = """
from safetensors.torch import load_file

def update_weights_from_ipc(context, handle, *, device_id, run, post_hook):
    run(list(load_file(handle).items()))
    post_hook()
"""
"""Stands in for the package `checkpoint_engine`, whose way from process to process is a GPU's: here it is a file."""


def launch(site: Path) -> Launch:
    """A server without storage at its start; `site`: a folder for what it imports."""
    package = site / "checkpoint_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "worker.py").write_text(CHECKPOINT_ENGINE)
    return Launch(flags=FLAGS, environ=(("PYTHONPATH", str(site)),))


def prompt(number: int, tokens: int = 400) -> list[int]:
    """No two of them begin alike."""
    return random.Random(number).choices(range(ord(" "), ord("~") + 1), k=tokens)


def when_idle(request: Callable[[], tuple[int, str]]) -> str:
    """The answer to one whom SGLang sends away while anything is under way, and who comes back."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        status, text = request()
        if status == 200:
            return text
        assert "not idle" in text
        assert time.monotonic() < deadline
        time.sleep(0.01)


def attach(server: Server, store: Path, **settings: Any) -> None:
    """The tier, with the given settings. Nobody measures here: what is there is loaded, although a busy machine may
    rather compute a short prompt once it has timed a few loads."""
    when_idle(lambda: server.attach(extra(store, **({"break_even": "off"} | settings))))
