"""What is given out: an sdist that is complete, a wheel that installs and works where there is no compiler."""

import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import tutti_sglang

ROOT = Path(__file__).parent.parent
PUBLIC = (
    "tutti_sglang.integration.plugin:register",
    "tutti_sglang.integration.hicache:TuttiHiCacheStorage",
    "tutti_sglang.store:ObjectStore",
    "tutti_sglang.store:Namespace",
    "tutti_sglang.engine.base:Engine",
    "tutti_sglang.config:Config",
    "tutti_sglang.config:load_config",
    "tutti_sglang.errors:TuttiError",
    "tutti_sglang.testing.engine_suite",
    "tutti_sglang.cli.app:main",
)
"""Names that others may rely on: a change of one is named in the changelog."""

ROUND_TRIP = """
import pathlib, sys, time
import numpy as np
from tutti_sglang.config import load_config
from tutti_sglang.kernels import native
from tutti_sglang.store import Namespace, ObjectStore
assert native.library() is None
settings = {"storage_dirs": [sys.argv[1]], "segment_size": "1MiB", "min_free_space": 0}
store = ObjectStore(load_config(settings, {}).config)
number = store.attach(Namespace(model="m", weights="", dtype="u1", page_size=1, tensors=(4096,), layers=(0, 1)))
data = np.arange(4096, dtype=np.uint8)
rows = np.array([[data.ctypes.data]], dtype=np.uint64)
assert store.put(number, b"k" * 32, rows, time.monotonic() + 9).all() and store.drain(9)
data[:] = 0
assert store.get(number, b"k" * 32, rows, time.monotonic() + 9).all()
assert (data == np.arange(4096, dtype=np.uint8)).all() and store.close()
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git knows of: what was forgotten there is missing here too."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    _build(source, out, "--sdist")
    (found,) = out.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist by somebody without a compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    _build(source, folder, "--wheel", CC="/bin/false", CXX="/bin/false")
    (found,) = folder.glob("*.whl")
    return found


def _build(source: Path, out: Path, kind: str, **changes: str) -> None:
    command = [sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


_SUFFIXES = {".cpp", ".hpp", ".cuh", ".cu", ".py"}


def test_the_sdist_has_every_source_of_the_native_libraries(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels").rglob("*") if path.suffix in _SUFFIXES}
    assert len(sources) > 20
    assert sources <= names
    assert {"requirements/base.txt", "tutti_sglang/py.typed", "LICENSE"} <= names


def test_a_wheel_without_a_compiler_installs_and_moves_bytes(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "tutti_sglang/py.typed" in archive.namelist()
        assert "tutti_sglang/kernels/native.py" in archive.namelist()
        assert not [name for name in archive.namelist() if name.startswith(("kernels/", "integration/", "tests/"))]
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=200)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(_dependencies())
    store = tmp_path / "store"
    done = subprocess.run([python, "-P", "-c", ROUND_TRIP, str(store)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("tutti", "tutti-sglang"):
        shown = subprocess.run([home / "bin" / name, "--version"], capture_output=True, text=True, check=True)
        assert shown.stdout.strip() == tutti_sglang.__version__


def _dependencies() -> str:
    """Where this environment has them; not the folder in which the editable installation of this checkout is."""
    here = Path(sysconfig.get_path("purelib"))
    paths = [path for path in sys.path if path.endswith("site-packages") and Path(path) != here]
    return "\n".join(paths or [str(here)])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_stay(name: str) -> None:
    if "integration.hicache" in name:
        pytest.importorskip("sglang")
    assert pkgutil.resolve_name(name)


def test_the_changelog_knows_the_version() -> None:
    assert f"## {tutti_sglang.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_dockerfile_copies_what_exists() -> None:
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines()]
    copied = [word for line in lines if line[:1] == ["COPY"] and "--from=build" not in line for word in line[1:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
    assert ["ARG", f"SGLANG={tutti_sglang.SGLANG_VERSION}"] in lines


def test_docker_finds_nothing_to_complain_of() -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker engine runs here")
    subprocess.run(["docker", "build", "--check", "."], cwd=ROOT, check=True)
