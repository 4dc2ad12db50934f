"""doctor on this machine, end to end; simulated machines are test_advice.py's."""

from pathlib import Path

from tests.cli.kit import parsed, tutti
from tutti_sglang.cli.app import VERBS


def test_doctor_looks_at_this_machine_and_leaves_no_trace(disk: Path) -> None:
    found = parsed("doctor", "--dir", disk, "--config", '{"min_free_space": 0, "segment_size": "1MiB"}')
    (drive,) = found["data"]["machine"]["drives"]
    assert drive["total_bytes"] > drive["free_bytes"] > 0
    assert not list(disk.iterdir())
    assert found["data"]["engine"]


def test_doctor_fails_for_a_link(disk: Path) -> None:
    (disk / "link").symlink_to(disk)
    found = parsed("doctor", "--dir", disk / "link")
    assert found["exit_code"] == 1
    assert any("symbolic link" in each["found"] for each in found["data"]["findings"])


def test_doctor_looks_at_a_launch_line() -> None:
    found = parsed("doctor", "--json", "--", "--hicache-storage-backend", "tutti")
    assert "HiCache is off" in [each["found"] for each in found["data"]["findings"] if each["level"] == "fail"]


def test_every_verb_has_help_with_an_example() -> None:
    for verb in VERBS:
        assert f"Example: tutti {verb.__name__}" in tutti(verb.__name__, "--help").stdout
