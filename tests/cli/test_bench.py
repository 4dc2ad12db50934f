"""bench moves real bytes on a real disk and leaves nothing behind."""

from pathlib import Path

from tests.cli.kit import parsed, tutti
from tutti_sglang.cli.bench import summary


def test_bench_measures_and_cleans_up(disk: Path) -> None:
    found = parsed("bench", "--dir", disk, "--object-size", "128KiB", "--size", "2MiB", "--rounds", "2")
    assert found["exit_code"] == 0
    data = found["data"]
    assert all(len(each) == 2 and min(each) > 0 for each in data["rounds"].values())
    assert {"store write", "store read"} <= data["rounds"].keys()
    assert "read of fio" in data["median"] or "fio is not installed" in data["setting"]
    assert not list(disk.iterdir())


def test_what_cannot_be_measured_is_refused(disk: Path) -> None:
    assert tutti("bench", "--dir", disk / "none").exit_code == 2
    assert tutti("bench", "--dir", disk, "--object-size", "3KiB").exit_code == 2
    assert tutti("bench", "--dir", disk, "--size", "900TiB").exit_code == 2


def test_ratios_are_of_the_same_round() -> None:
    found = summary({"store read": [1.0, 3.0], "fio read": [2.0, 3.0], "store write": [1.0, 1.0]})
    assert found["read of fio"] == 0.75
    assert "write of fio" not in found
