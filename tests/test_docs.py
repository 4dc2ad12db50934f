"""The documentation pages say what the code does."""

import re
from pathlib import Path

import msgspec

from tutti_sglang.config import Config, load_config
from tutti_sglang.metrics import _COUNTERS, _GAUGES
from tutti_sglang.units import parse_size

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _rows(page: Path) -> list[list[str]]:
    """The cells of every table row whose first cell is code."""
    lines = [line.strip().strip("|") for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def test_the_configuration_page_lists_every_setting_with_its_default() -> None:
    rows = {row[0].strip("`"): row[1] for row in _rows(DOCS / "configuration.md")}
    assert list(rows) == [
        "storage_dirs",
        *(name for name in Config.__struct_fields__ if name != "storage_dirs"),
    ]
    for field in msgspec.structs.fields(Config):
        if field.name == "storage_dirs":
            continue
        shown = rows[field.name].strip("`")
        default = parse_size(shown) if shown.endswith("iB") else shown.strip('"')
        assert str(default) == str(field.default), field.name


def test_the_launch_line_on_the_configuration_page_loads() -> None:
    text = (DOCS / "configuration.md").read_text()
    extra = re.search(r"extra-config '(\{.*\})'", text)
    assert extra
    assert load_config(msgspec.json.decode(extra[1]), {}).config.max_size == 800 << 30


def test_the_metrics_page_lists_every_metric_with_its_labels() -> None:
    rows = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in _rows(DOCS / "metrics.md")}
    known = {name: set(labels) for name, (_, labels) in (_COUNTERS | _GAUGES).items()}
    assert rows == known


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
