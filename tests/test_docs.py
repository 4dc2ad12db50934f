"""The documentation pages say what the code does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tutti_sglang.cli.app import VERBS
from tutti_sglang.config import Config, PeerConfig, load_config
from tutti_sglang.metrics import _COUNTERS, _GAUGES, _HISTOGRAMS
from tutti_sglang.units import parse_size

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _rows(page: Path) -> list[list[str]]:
    """The cells of every table row whose first cell is code."""
    lines = [line.strip().strip("|") for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def test_the_configuration_page_lists_every_setting_with_its_default() -> None:
    rows = {row[0].strip("`"): row[1] for row in _rows(DOCS / "configuration.md")}
    fields = {field.name: field for field in msgspec.structs.fields(Config)}
    fields |= {f"peer.{field.name}": field for field in msgspec.structs.fields(PeerConfig)}
    assert list(rows) == ["storage_dirs", *(name for name in fields if name != "storage_dirs")]
    for name, field in fields.items():
        if field.required:
            assert rows[name] == "*(required)*", name
            continue
        shown = rows[name].strip("`")
        default = parse_size(shown) if re.fullmatch(r"\d+(\wi)?B", shown) else shown.strip('"')
        assert str(default) == str(field.default), name


def test_the_launch_line_on_the_configuration_page_loads() -> None:
    text = (DOCS / "configuration.md").read_text()
    extra = re.search(r"extra-config '(\{.*\})'", text)
    assert extra
    assert load_config(msgspec.json.decode(extra[1]), {}).config.max_size == 800 << 30


def test_the_metrics_page_lists_every_metric_with_its_labels() -> None:
    rows = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in _rows(DOCS / "metrics.md")}
    known = {name: set(labels) for name, (_, labels) in (_COUNTERS | _GAUGES | _HISTOGRAMS).items()}
    assert rows == known


def test_the_command_line_page_lists_every_verb() -> None:
    assert [row[0].strip("`") for row in _rows(DOCS / "cli.md")] == [verb.__name__ for verb in VERBS]


def test_board_and_alerts_ask_for_metrics_that_exist_by_labels_that_they_have() -> None:
    board = msgspec.json.decode((DOCS / "monitoring" / "grafana.json").read_bytes())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += re.findall(r"expr: (.*)", (DOCS / "monitoring" / "alerts.yml").read_text())
    assert len(asked) > 15
    for expression in asked:
        labels: set[str] = {"instance", "le"}
        for name in re.findall(r"tutti_\w+", expression):
            base = re.sub("_(total|bucket)$", "", name)
            known = (_COUNTERS | _GAUGES | _HISTOGRAMS).get(base)
            assert known, f"no metric {name}"
            assert name == base + ("_total" if base in _COUNTERS else "_bucket" if base in _HISTOGRAMS else ""), name
            labels |= set(known[1])
        for used in re.findall(r"by \(([\w, ]+)\)|(\w+)=~?\"", expression):
            assert {each.strip() for each in (used[0] or used[1]).split(",")} <= labels, expression


def test_prometheus_loads_the_alert_rules() -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    subprocess.run(["promtool", "check", "rules", str(DOCS / "monitoring" / "alerts.yml")], check=True)


def test_the_site_builds_with_strict_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "operations" / "index.html").exists()


def test_every_relative_link_leads_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *DOCS.glob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (*ROOT.glob("*.md"), *DOCS.glob("*.md")):
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in targets, f"{page.name} names make {target}"


def test_every_test_named_in_the_bug_report_table_exists() -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "bug-reports.md").read_text()):
        assert (ROOT / file).exists(), file
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_bug_report_has_a_test_or_a_reason() -> None:
    lines = [line for line in (DOCS / "bug-reports.md").read_text().splitlines() if line.startswith("| [B")]
    assert len(lines) == len({line.split("]")[0] for line in lines}) == 112
    for line in lines:
        shown = line.strip("| ").split(" | ")[-1]
        assert shown.startswith(("`tests/", "open: ", "not applicable, because ")), line
