"""Plugins of the tests: modules with a function `register`, copied to where a server's processes find them."""

from pathlib import Path
from types import ModuleType


def install(site: Path, module: ModuleType) -> None:
    """Make `site`, to be put on a server's PYTHONPATH, a distribution that offers this plugin."""
    name = "tutti_test_" + module.__name__.rpartition(".")[2]
    info = site / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    (site / f"{name}.py").write_text(Path(str(module.__file__)).read_text())
