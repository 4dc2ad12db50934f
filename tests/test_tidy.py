"""The repository keeps its own rules: sizes, style, types, imports, and a package list that equals the disk."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE_LINES, FUNCTION_LINES = 330, 75
CODE = ("tutti_sglang", "kernels", "integration", "benchmarks")


def _sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents if part != ROOT):
                yield path


def _tool(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in _sources(*CODE)])
def test_a_file_and_its_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES, f"{path} has {text.count(chr(10))} lines: it is two things"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"


def test_style() -> None:
    _tool("ruff", "check", ".")


def test_format() -> None:
    _tool("ruff", "format", "--check", ".")


def test_types() -> None:
    _tool("mypy")


def test_the_package_list_equals_the_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in _sources("tutti_sglang")}
    folders |= {Path("tutti_sglang") / p.parent.relative_to(ROOT) for p in _sources("kernels", "integration")}
    assert set(project["packages"]) == {".".join(folder.parts) for folder in folders}


@pytest.mark.parametrize("name", ["kernels", "integration"])
def test_the_root_does_not_shadow_a_dependency(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists()
    link = ROOT / "tutti_sglang" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_importing_the_package_needs_neither_torch_nor_a_device() -> None:
    code = (
        "import sys, threading, tutti_sglang.store, tutti_sglang.engine, tutti_sglang.config;"
        "assert not {'torch', 'sglang', 'cuda'} & set(sys.modules); assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
