"""The CPU platform alone, with SGLang's own storage backend: whole, repeatable, invisible to whoever did not ask."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.server import Launch, Server, Servers, hicache
from tutti_sglang.integration.cpu_model import Shape, built_in_model
from tutti_sglang.integration.cpu_server import PLATFORM, cpu_environment, write_site

ROOT = Path(__file__).parent.parent.parent
FOX = "The quick brown fox jumps over the lazy dog. " * 24

DIRECT = ("--hicache-io-backend", "direct", "--hicache-mem-layout")
BUFFER_ONLY = ("--hicache-host-memory-mode", "buffer_only")
CASES = {
    "page_first_direct": (64, 1, 0, (*DIRECT, "page_first_direct")),
    "layer_first, two ranks, no overlap": (16, 2, 0, (*DIRECT, "layer_first", "--disable-overlap-schedule")),
    "MLA, page_first, buffer_only": (1, 1, 128, ("--hicache-io-backend", "kernel", *BUFFER_ONLY)),
}


@pytest.mark.server
class TestServer:
    """Each case is one server, shared by these tests."""

    @pytest.fixture(scope="class", params=CASES.values(), ids=CASES)
    def case(
        self, request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory, drive: Path
    ) -> tuple[Server, int]:
        page_size, ranks, latent, flags = request.param
        model = built_in_model(tmp_path_factory.mktemp("models"), shape=Shape(latent=latent)) if latent else None
        files = drive / f"file-{page_size}"
        files.mkdir()
        flags = hicache("file", "--file-storage-path", str(files), "--page-size", str(page_size), *flags)
        return servers.get(Launch(flags, model, ranks=ranks)), page_size

    def test_a_prompt_comes_back_from_storage_with_equal_tokens(self, case: tuple[Server, int]) -> None:
        server, page_size = case
        cold = server.generate(FOX)
        assert (cold.prompt_tokens, cold.storage, cold.host, cold.device) == (len(FOX), 0, 0, 0)
        server.flush()
        restored = server.generate(FOX)
        # The last token is always computed, and only whole pages are kept.
        assert restored.storage == (len(FOX) - 1) // page_size * page_size
        assert (restored.host, restored.device) == (0, 0)
        assert restored.tokens == cold.tokens

    def test_a_prompt_shares_only_the_pages_of_a_common_beginning(self, case: tuple[Server, int]) -> None:
        server, page_size = case
        first = server.generate(FOX + "An end.")
        server.flush()
        other = server.generate(FOX + "Another end.")
        assert len(FOX) // page_size * page_size <= other.storage <= len(FOX) + len("An")
        assert other.tokens != first.tokens

    def test_replies_depend_on_the_whole_prompt_and_do_not_repeat_one_token(self, case: tuple[Server, int]) -> None:
        server, _ = case
        replies = server.generate_many([FOX, "Z" + FOX[1:], FOX[:500] + "Z" + FOX[501:], "Hello"], tokens=32)
        assert len({reply.tokens for reply in replies}) == len(replies)
        assert min(len(set(reply.tokens)) for reply in replies) >= 8

    def test_a_chat_says_where_its_prompt_came_from(self, case: tuple[Server, int]) -> None:
        server, page_size = case
        first = server.chat(FOX)
        server.flush()
        again = server.chat(FOX)
        cached = again["sglext"]["cached_tokens_details"]
        assert cached["storage"] == (again["usage"]["prompt_tokens"] - 1) // page_size * page_size
        assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]


def _python(code: str, environ: dict[str, str]) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


ENTRIES = """from importlib.metadata import entry_points
for group in ("platforms", "plugins"):
    print(sorted({e.name for e in entry_points(group=f"sglang.srt.{group}") if "tutti" in e.value}))"""
EXCLUDED = "from sglang.srt.plugins import _get_excluded_dists as x; print(sorted(x()))"
CURRENT = "from sglang.srt.platforms import current_platform as c; print(type(c).__name__)"


def test_the_platform_is_visible_only_to_a_server_that_was_given_its_folder(tmp_path: Path) -> None:
    environ = cpu_environment(os.environ, write_site(tmp_path))
    assert _python(ENTRIES, environ).split() == [f"['{PLATFORM}']", "['tutti']"]
    del environ["PYTHONPATH"]
    assert _python(ENTRIES, environ).split()[0] == "[]"


def test_the_folder_brings_the_plugin_where_the_package_is_not_installed(tmp_path: Path) -> None:
    code = f"import sys; sys.path.append({str(ROOT)!r}); from pathlib import Path;"
    code += "from tutti_sglang.integration import cpu_server as c; c._is_installed = lambda: False;"
    code += f"c.write_site(Path({str(tmp_path)!r}))"
    _python(code, dict(os.environ))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    where = "import os; os.chdir('/'); import tutti_sglang.integration.plugin as p; print(p.__file__)\n"
    answer = [f"{tmp_path}/tutti_sglang/integration/plugin.py", f"['{PLATFORM}']", "['tutti']"]
    assert _python(where + ENTRIES, environ).split() == answer


def test_other_hardware_keeps_its_platform_and_the_tier(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    site = write_site(tmp_path)
    environ = cpu_environment(os.environ, site) | {"SGLANG_PLATFORM": "vendor"}
    (site / "vendor.py").write_text("def activate(): return 'sglang.srt.platforms.cpu.CpuSRTPlatform'")
    info = site / "vendor-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.platforms]\nvendor = vendor:activate\n")
    answer = _python(f"{CURRENT};{EXCLUDED}", environ).split()
    assert answer == ["CpuSRTPlatform", "['tutti-sglang-cpu-platform']"]


def test_the_platform_sleeps_until_it_is_named(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    environ = cpu_environment(os.environ, write_site(tmp_path))
    del environ["SGLANG_PLATFORM"]
    assert _python(CURRENT, environ) == "SRTPlatform"


def test_the_platform_is_sglangs_cpu_but_for_what_it_cannot_run() -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    from tutti_sglang.integration.cpu_platform import TuttiCpuPlatform

    own = {name for name in vars(TuttiCpuPlatform) if not name.startswith("__")}
    assert own - {"_enum", "init_backend"} == {
        "apply_server_args_defaults",
        "get_default_attention_backend",
        "get_device",
        "support_mamba_cache_extra_buffer",
    }
    args = SimpleNamespace(attention_backend="intel_amx", page_size=1)
    TuttiCpuPlatform().apply_server_args_defaults(args)
    assert vars(args) == {"attention_backend": "torch_native", "page_size": 1}


def test_numbers_that_are_as_good_as_zero_cost_no_time_in_any_thread(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    code = "from sglang.srt.platforms import current_platform as c; c.init_backend(); import torch;"
    code += "print((torch.full((1 << 22,), 1e-40) * 1).count_nonzero().item())"
    assert _python(code, cpu_environment(os.environ, write_site(tmp_path))) == "0"


def test_ranks_share_the_cores(tmp_path: Path) -> None:
    environ = cpu_environment({"PYTHONPATH": "/other"}, tmp_path, ranks=3)
    cores = sorted(os.sched_getaffinity(0))
    shares = [[int(core) for core in share.split(",")] for share in environ["SGLANG_CPU_OMP_THREADS_BIND"].split("|")]
    assert len(shares) % 3 == 0
    assert set(cores) == {core for share in shares for core in share}
    assert environ["PYTHONPATH"] == f"{tmp_path}:/other"
    assert 1 <= int(environ["OMP_NUM_THREADS"]) <= max(1, len(cores) // 3)
