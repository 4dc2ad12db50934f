"""SGLang's own kit for trees over storage, with this tier as the storage: kit_suite.py, in a process of its own.

A process of its own, because the plugin changes SGLang's classes there, as it does in a scheduler.
"""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

from tutti_sglang.integration.cpu_server import cpu_environment, write_site

pytest.importorskip("sglang", reason="SGLang is not installed")

ROOT = Path(__file__).parent.parent.parent
SUITE = Path(__file__).with_name("kit_suite.py")
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1500)]

Results = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """For each check and configuration of the kit "" or what went wrong."""
    folder = tmp_path_factory.mktemp("kits")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-W", "ignore", f"--junitxml={report}"]
    with tempfile.TemporaryDirectory(prefix="tutti-test-", dir="/var/tmp") as stores:  # which knows O_DIRECT
        plain = os.environ | {"HF_HUB_OFFLINE": "1", "TMPDIR": stores}
        environ = cpu_environment(plain, write_site(folder / "site"))
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1400)
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found: Results = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            bad = [child for child in case if child.tag in ("failure", "error")]
            assert case.get("name", "").startswith("test_"), "".join(child.text or "" for child in bad)[-4000:]
            configuration = case.get("classname", "").rpartition(".")[2]
            found[case.get("name", "")][configuration] = (bad[0].text or "")[-3000:] if bad else ""
    return found


def _check(results: Results, name: str, configurations: int) -> None:
    seen = results[name]
    assert len(seen) >= configurations
    failures = {configuration: why for configuration, why in seen.items() if why}
    assert not failures, "\n".join(f"{configuration}:\n{why}" for configuration, why in failures.items())


def test_every_pool_comes_back_byte_for_byte(results: Results) -> None:
    _check(results, "test_every_pool_comes_back_byte_for_byte", 7)


def test_a_longer_prompt_finds_what_is_there_and_another_prompt_nothing(results: Results) -> None:
    _check(results, "test_a_longer_prompt_finds_what_is_there_and_another_prompt_nothing", 7)


def test_a_namespace_of_the_request_keeps_prompts_apart(results: Results) -> None:
    _check(results, "test_a_namespace_of_the_request_keeps_prompts_apart", 7)


def test_buffer_only_restores_through_staging_and_leaves_it_empty(results: Results) -> None:
    _check(results, "test_buffer_only_restores_through_staging_and_leaves_it_empty", 5)


def test_buffer_only_keeps_what_a_sibling_brought_meanwhile(results: Results) -> None:
    _check(results, "test_buffer_only_keeps_what_a_sibling_brought_meanwhile", 5)


def test_buffer_only_fetches_a_window_for_resident_kv(results: Results) -> None:
    _check(results, "test_buffer_only_fetches_a_window_for_resident_kv", 3)


def test_a_rank_without_the_window_keeps_all_from_restoring_it(results: Results) -> None:
    _check(results, "test_a_rank_without_the_window_keeps_all_from_restoring_it", 3)


def test_every_check_of_the_suite_is_looked_at(results: Results) -> None:
    assert set(results) == set(re.findall(r"def (test_\w+)\(", SUITE.read_text()))
    assert set(results) <= set(re.findall(r"def (test_\w+)\(", Path(__file__).read_text()))
