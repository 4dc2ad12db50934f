"""The command as a user calls it, and a store to look at."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tests.store.kit import namespace, open_store, store_pages
from tutti_sglang.cli.app import app


def tutti(*words: str | Path) -> Result:
    """Run the command; a crash of it is the test's."""
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def parsed(*words: str | Path) -> dict[str, Any]:
    """The one JSON object that the command prints; its exit code is in it."""
    result = tutti(*words, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["exit_code"] == result.exit_code
    assert found["command"] == words[0]
    assert found["schema"] == 1
    return found


def filled(drive: Path, pages: int = 40) -> int:
    """A closed store at `drive` with pages 1 … of one namespace, whose number is returned."""
    store = open_store(drive)
    number = store.attach(namespace())
    store_pages(store, number, *range(1, pages + 1))
    assert store.close()
    return number
