"""Imports run downward, and each layer stays clear of what is not its business."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tutti_sglang"

# Top to bottom: a module may import from its own line and from lines below it.
LAYERS = (
    ("integration", "cli", "testing"),
    ("schedule",),
    ("store",),
    ("engine",),
    ("gio",),
    ("layout", "geometry", "checksum", "config", "metrics", "memory", "units", "kernels"),
    ("errors",),
)
# kernels/ and the ground both stand at the bottom; checksum and memory ask kernels/native for the compiled twin.
FORBIDDEN = {
    "sglang": set(sum(LAYERS, ())) - {"integration"},
    "torch": {"store", "schedule", "layout", "geometry", "config", "metrics", "units", "errors"},
    "triton": {"store", "schedule", "layout", "geometry", "config", "metrics", "units", "errors"},
    "cuda": {"store", "schedule", "layout", "geometry", "config", "metrics", "units", "errors"},
}


def _modules() -> Iterator[tuple[str, Path]]:
    """(first name below tutti_sglang, file), the symlinked folders included."""
    for path in PACKAGE.glob("*"):
        files = path.rglob("*.py") if path.is_dir() else [path] if path.suffix == ".py" else []
        for file in files:
            yield file.relative_to(PACKAGE).with_suffix("").parts[0], file


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write absolute imports"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _height(name: str) -> int:
    return next(height for height, layer in enumerate(LAYERS) if name in layer)


@pytest.mark.parametrize(("name", "file"), [pytest.param(n, f, id=str(f.relative_to(ROOT))) for n, f in _modules()])
def test_a_module_imports_only_what_lies_below_it(name: str, file: Path) -> None:
    if name == "__init__":
        return
    for imported in _imports(file):
        parts = imported.split(".")
        if parts[0] == "tutti_sglang" and len(parts) > 1 and any(parts[1] in layer for layer in LAYERS):
            assert _height(parts[1]) >= _height(name), f"{file} imports {imported}, which lies above it"
        assert name not in FORBIDDEN.get(parts[0], ()), f"{file} must not import {parts[0]}"


def test_every_module_has_its_layer() -> None:
    names = {name for name, _ in _modules()} - {"__init__"}
    assert names <= set(sum(LAYERS, ()))
