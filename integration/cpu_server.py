"""What a server needs to run on the CPU reference platform: where SGLang finds it, the environment and the flags.

SGLang finds platforms by the entry points of distributions. Ours must not be in the wheel's: when SGLANG_PLATFORM names
another platform, SGLang skips the plugins of every distribution that offers one (plugins/__init__.py:93), and the tier
would vanish for users of other hardware. So a folder on the PYTHONPATH of one server stands in for a distribution that
nobody installed.
"""

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import tutti_sglang
from tutti_sglang.integration.cpu_model import Shape

PLATFORM = "tutti_cpu"
MAX_REPLICAS = 8
_PLATFORM_ENTRY = f"[sglang.srt.platforms]\n{PLATFORM} = tutti_sglang.integration.cpu_platform:activate\n"
_PLUGIN_ENTRY = "[sglang.srt.plugins]\ntutti = tutti_sglang.integration.plugin:register\n"


def write_site(folder: Path) -> Path:
    """Fill `folder` with the platform's distribution and return it.

    Where tutti-sglang runs from its sources without installation, the package and its plugin are added.
    """
    _write_distribution(folder, "tutti-sglang-cpu-platform", _PLATFORM_ENTRY)
    if not _is_installed():
        _write_distribution(folder, "tutti-sglang", _PLUGIN_ENTRY)
        (folder / "tutti_sglang").symlink_to(Path(tutti_sglang.__file__).parent)
    return folder


def _write_distribution(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{tutti_sglang.__version__}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {tutti_sglang.__version__}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _is_installed() -> bool:
    """Whether every process of this interpreter finds the plugin, not only those that start in this folder."""
    path = [entry for entry in sys.path if entry and Path(entry) != Path.cwd()]
    return any(importlib.metadata.distributions(name="tutti-sglang", path=path))


def cpu_environment(environ: Mapping[str, str], site: Path, ranks: int = 1) -> dict[str, str]:
    """`environ` for a server of `ranks` processes on the CPU platform; `site` comes from `write_site`.

    No GPU is visible, for SGLang asks torch for one in places that do not ask the platform. OpenMP gets half of the
    cores, since threads that wait for a core spin (TP=2 on two busy cores: 12 s for a request with OpenMP's default,
    1 s with a thread per rank).
    """
    cores = sorted(os.sched_getaffinity(0))
    shares = [",".join(map(str, cores[rank::ranks] or cores)) for rank in range(ranks)]
    paths = filter(None, [str(site), environ.get("PYTHONPATH")])
    return {
        # Without this SGLang refuses more processes than NUMA nodes; it does not mind too many entries (PP, DP).
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(shares * MAX_REPLICAS),
        "OMP_NUM_THREADS": str(max(1, len(cores) // (2 * ranks))),
        **environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_PLATFORM": PLATFORM,
        "CUDA_VISIBLE_DEVICES": "",
    }


def cpu_flags(*, built_in: bool = True) -> list[str]:
    """Flags for the built-in model, or for another; later flags override them.

    Only sizes and precision: SGLang would give the KV cache nine tenths of the machine's memory, and would run the
    float32 model in float16, whose rounding may prefer another of two near tokens when part of a prompt was restored.
    """
    flags = ["--max-running-requests", "32"]
    if built_in:
        return [*flags, "--dtype", "float32", "--max-total-tokens", str(Shape().context + 4096)]
    return [*flags, "--max-total-tokens", "16384"]
