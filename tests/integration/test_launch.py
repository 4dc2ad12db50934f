"""`make serve`: the command that it runs, and what a new user sees who types what it prints."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server import START_SECONDS, STOP_SECONDS, Servers
from tutti_sglang.config import load_config, read_extra_config
from tutti_sglang.integration import launch
from tutti_sglang.integration.cpu_server import PLATFORM

ROOT = Path(__file__).parent.parent.parent


def _plan(tmp_path: Path, *arguments: str, gpu: bool = False) -> launch.Launch:
    return launch.plan(
        *launch._parse(["--store", str(tmp_path / "store"), *arguments]), gpu=gpu, site=tmp_path / "site"
    )


def _values(command: list[str], flag: str) -> list[str]:
    return [command[i + 1] for i, word in enumerate(command) if word == flag]


def test_without_a_gpu_the_built_in_model_runs_on_the_cpu_platform(tmp_path: Path) -> None:
    planned = _plan(tmp_path)
    assert planned.environ["SGLANG_PLATFORM"] == PLATFORM
    assert planned.environ["PYTHONPATH"].startswith(f"{tmp_path}/site")
    assert (tmp_path / "site").is_dir()
    assert _values(planned.command, "--dtype") == ["float32"]


def test_with_a_gpu_nothing_of_the_platform_is_there(tmp_path: Path) -> None:
    planned = _plan(tmp_path, "--model", "org/name", gpu=True)
    assert planned.environ == dict(os.environ)
    assert not (tmp_path / "site").exists()
    assert _values(planned.command, "--model-path") == ["org/name"]
    assert "--max-total-tokens" not in planned.command
    assert "GPU" in planned.about


def test_the_store_is_a_setting_that_the_tier_accepts_and_may_fill_the_users_drive(tmp_path: Path) -> None:
    (extra,) = _values(_plan(tmp_path).command, "--hicache-storage-backend-extra-config")
    config = load_config(read_extra_config(extra), {}).config
    assert config.storage_dirs == (f"{tmp_path}/store",)
    assert config.max_size == 0


def test_the_default_store_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    planned = launch.plan(*launch._parse([]), gpu=True, site=tmp_path)
    (extra,) = _values(planned.command, "--hicache-storage-backend-extra-config")
    config = load_config(read_extra_config(extra), {}).config
    assert config.storage_dirs == (f"{tmp_path}/.cache/tutti-sglang/store",)
    assert config.max_size == 4 << 30


def test_further_flags_reach_sglang_and_win(tmp_path: Path) -> None:
    own = '{"storage_dirs": ["/mnt/a"]}'
    flags = ["--", "--page-size", "16", "--hicache-storage-backend-extra-config", own, "--max-total-tokens", "999"]
    command = _plan(tmp_path, *flags).command
    assert command[-6:] == flags[1:]
    assert _values(command, "--hicache-storage-backend-extra-config") == [own]
    assert _values(command, "--max-total-tokens")[-1] == "999"


def test_port_and_ranks_count_wherever_they_are_written(tmp_path: Path) -> None:
    for arguments in (["--port", "4000", "--tp", "2", "--"], ["--", "--port", "4000", "--tp-size", "2"]):
        options, flags = launch._parse(arguments)
        assert (options.port, options.tp, flags) == (4000, 2, [])


def test_without_the_tier_there_is_no_trace_of_it(tmp_path: Path) -> None:
    assert not [word for word in _plan(tmp_path, "--without-tier").command if "hicache" in word or "hierarch" in word]
    assert not (tmp_path / "store").exists()


def test_metrics_become_a_line_about_the_last_requests() -> None:
    before = "\n".join(
        [
            "# TYPE sglang:num_requests_total counter",
            'sglang:num_requests_total{is_streaming="false"} 1.0',
            'sglang:num_requests_total{is_streaming="true"} 1.0',
            "# TYPE sglang:prompt_tokens_total counter",
            'sglang:prompt_tokens_total{is_streaming="false"} 100.0',
            "# TYPE sglang:cached_tokens_total counter",
            'sglang:cached_tokens_total{cache_source="host"} 10.0',
        ]
    )
    after = before.replace("} 100.0", "} 250.0").replace('"true"} 1.0', '"true"} 3.0')
    after += '\nsglang:cached_tokens_total{cache_source="storage"} 128.0\n'
    assert launch.served(before) == Counter(requests=2, prompt=100, host=10)
    change = launch.served(after) - launch.served(before)
    line = "2 requests, 150 prompt tokens: 128 from storage, 0 from host memory, 0 from the device, 22 computed"
    assert launch.describe(change) == line


class _Output:
    """What a launcher has printed, as it grows."""

    def __init__(self, log: Path, process: "subprocess.Popen[bytes]") -> None:
        self._log, self._process = log, process

    def wait_for(self, pattern: str, seconds: float) -> list[str]:
        """All matches, once there is one."""
        deadline = time.monotonic() + seconds
        while not (found := re.findall(pattern, self._log.read_text(errors="replace"), re.MULTILINE)):
            text = self._log.read_text(errors="replace")[-4000:]
            assert self._process.poll() is None, f"the launcher ended\n{text}"
            assert time.monotonic() < deadline, f"no {pattern!r}\n{text}"
            time.sleep(0.3)
        return found


@pytest.mark.server
def test_what_the_launcher_prints_can_be_typed_and_ctrl_c_ends_everything(
    servers: Servers, drive: Path, tmp_path: Path
) -> None:
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    servers.close()
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tutti_sglang.integration.launch", "--port", str(launch.free_port())]
    command += ["--store", str(drive / "launch")]
    environ = os.environ | {"SGLANG_HICACHE_TUTTI_BREAK_EVEN": "off"}  # on a busy disk it would load less
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=file, start_new_session=True)
    try:
        output = _Output(log, process)
        ask, flush = output.wait_for(r"^  (curl .*)$", START_SECONDS)
        first = _type(ask)
        assert "Cache flushed" in subprocess.run(flush, shell=True, capture_output=True, text=True, timeout=120).stdout
        second = _type(ask)
        cached = second["sglext"]["cached_tokens_details"]
        assert cached["storage"] >= 1024
        assert second["choices"][0]["message"] == first["choices"][0]["message"]
        # A fast machine answers both before the launcher looks once.
        output.wait_for(rf"^tutti: [12] requests?, \d+ prompt tokens: {cached['storage']} from storage", 60)
        group = _descendants(process.pid)
        assert len(group) >= 3
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_SECONDS + 30) == 0
        deadline = time.monotonic() + STOP_SECONDS
        while alive := [pid for pid in group if _runs(pid)]:
            assert time.monotonic() < deadline, f"{alive} outlive the launcher"
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait(30)


def _type(line: str) -> dict[str, Any]:
    answer = subprocess.run(line, shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stderr
    value: dict[str, Any] = json.loads(answer.stdout)
    return value


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # who inherits the dead may be slow to bury them


def _descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on, as long as it runs."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [grandchild for child in children for grandchild in _descendants(child)]
