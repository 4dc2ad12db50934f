"""verify, gc and clear, on real stores, beside one that is open."""

import os
from pathlib import Path

import pytest

from tests.cli.kit import filled, parsed, tutti
from tests.store.kit import lookup, namespace, open_store, segment_files, store_pages


def test_a_good_store_verifies_with_exit_code_zero(disk: Path) -> None:
    filled(disk)
    found = parsed("verify", "--dir", disk)
    assert found["exit_code"] == 0
    assert found["data"]["objects"] == 40


def test_damage_is_found_repaired_and_gone(disk: Path) -> None:
    filled(disk)
    with segment_files(disk)[0].open("r+b") as file:
        file.write(os.urandom(64 << 10))
    found = parsed("verify", "--dir", disk)
    assert found["exit_code"] == 1
    assert found["data"]["damaged"] > 0
    assert parsed("verify", "--dir", disk, "--repair")["data"]["repaired"] == found["data"]["damaged"]
    again = parsed("verify", "--dir", disk)
    assert again["exit_code"] == 0
    assert again["data"]["objects"] == 40 - found["data"]["damaged"]


def test_a_visit_does_not_shrink_a_store_that_fills_its_disk(disk: Path) -> None:
    filled(disk)
    sizes = [file.stat().st_size for file in segment_files(disk)]
    tutti("verify", "--dir", disk, "--config", '{"max_size": "1MiB", "segment_size": "1MiB"}')
    assert [file.stat().st_size for file in segment_files(disk)] == sizes


def test_a_visit_needs_no_device(disk: Path) -> None:
    filled(disk)
    assert parsed("verify", "--dir", disk, "--config", '{"engine": "gds"}')["exit_code"] == 0


@pytest.mark.parametrize("verb", [("clear",), ("gc", "--unused-for", "1s")])
def test_nothing_is_removed_without_yes(disk: Path, verb: tuple[str, ...]) -> None:
    filled(disk)
    assert parsed(*verb, "--dir", disk)["exit_code"] == 3
    assert parsed("inspect", "--dir", disk)["data"]["objects"] == 40


def test_clear_gives_the_disk_back_beside_an_open_store_which_goes_on(disk: Path) -> None:
    number = filled(disk)
    store = open_store(disk)
    assert store.attach(namespace()) == number
    assert lookup(store, number, 1) == [True]
    found = parsed("clear", "--dir", disk, "--yes")
    assert found["data"]["objects"] == 40
    assert found["data"]["segments"] == 2
    assert not segment_files(disk)
    assert lookup(store, number, 1) == [False]
    store_pages(store, number, 7)
    assert lookup(store, number, 7) == [True]
    assert store.close()


def test_clear_leaves_the_other_namespaces(disk: Path) -> None:
    number = filled(disk)
    store = open_store(disk)
    other = store.attach(namespace("other"))
    store_pages(store, other, 1)
    assert store.close()
    assert parsed("clear", "--dir", disk, "--namespace", str(number), "--yes")["data"]["objects"] == 40
    assert parsed("inspect", "--dir", disk)["data"]["objects"] == 1
    assert parsed("clear", "--dir", disk, "--namespace", "77", "--yes")["exit_code"] == 2


def test_gc_empties_what_nobody_used_and_only_that(disk: Path) -> None:
    filled(disk)
    assert parsed("gc", "--dir", disk, "--unused-for", "30d", "--yes")["data"]["objects"] == 0
    assert parsed("gc", "--dir", disk)["data"]["segments"] == 0
    assert parsed("gc", "--dir", disk, "--unused-for", "0s", "--yes")["data"]["objects"] == 40


def test_a_directory_that_is_no_store_is_an_error_that_names_the_next_step(disk: Path) -> None:
    for verb in ("verify", "gc", "inspect"):
        found = parsed(verb, "--dir", disk / "none")
        assert found["exit_code"] == 2
        assert "no store" in found["error"]["message"]
        assert found["error"]["hint"]
    assert not (disk / "none").exists()


def test_a_bad_age_is_refused(disk: Path) -> None:
    assert parsed("gc", "--dir", disk, "--unused-for", "soon", "--yes")["exit_code"] == 2
