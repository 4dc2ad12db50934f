"""Fixtures of the end-to-end tests: one server at a time, and folders on a real file system."""

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import administrator
from tests.integration.server import Launch, Servers


@pytest.fixture(scope="session")
def drive() -> Iterator[Path]:
    """A folder for stores on a file system that knows O_DIRECT, which tmpfs does not."""
    folder = Path(tempfile.mkdtemp(prefix="tutti-test-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def disk(drive: Path) -> Path:
    """An empty folder for the stores of one test."""
    return Path(tempfile.mkdtemp(dir=drive))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """`servers.get(Launch(...))`: tests that ask for equal launches in a row share the server."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The server that tests of an administrator's requests share; their files follow one another, so that it is one."""
    return administrator.launch(tmp_path_factory.mktemp("control"))
