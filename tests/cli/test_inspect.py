"""inspect tells what lies in a store, and changes nothing."""

from pathlib import Path

from tests.cli.kit import filled, parsed, tutti
from tests.store.kit import keys, namespace, open_store, segment_files, store_pages


def test_inspect_shows_drives_namespaces_and_processes(disk: Path) -> None:
    number = filled(disk)
    store = open_store(disk)
    data = parsed("inspect", "--dir", disk)["data"]
    assert store.close()
    assert data["objects"] == 40
    (drive,) = data["drives"]
    assert (drive["ordinal"], drive["problem"], drive["segments"]) == (0, "", 2)
    assert drive["segment_bytes"] == sum(file.stat().st_size for file in segment_files(disk))
    (space,) = data["namespaces"]
    assert (space["id"], space["identity"]["model"], space["objects"]) == (number, "m", 40)
    assert [owner["alive"] for owner in data["owners"]] == [True]
    text = tutti("inspect", "--dir", disk).stdout
    assert "kv of m, 16 tokens, bfloat16" in text


def test_inspect_creates_nothing(disk: Path) -> None:
    filled(disk)
    before = sorted(path.relative_to(disk) for path in disk.rglob("*") if "index.db" not in path.name)
    parsed("inspect", "--dir", disk)
    assert sorted(path.relative_to(disk) for path in disk.rglob("*") if "index.db" not in path.name) == before


def test_a_directory_that_is_not_a_drive_of_the_store_is_found(disk: Path) -> None:
    filled(disk / "one")
    (disk / "two").mkdir()
    found = parsed("inspect", "--dir", disk / "one", "--dir", disk / "two")
    assert found["exit_code"] == 1
    assert [drive["problem"] for drive in found["data"]["drives"]] == ["", "no superblock"]


def test_a_prefix_whose_first_page_is_missing_is_named(disk: Path) -> None:
    store = open_store(disk)
    number = store.attach(namespace())
    store_pages(store, number, *range(1, 8))
    assert store.close()
    words = [word for page in range(8) for word in ("--key", keys(page).hex())]
    found = parsed("inspect", "--dir", disk, *words)
    assert found["exit_code"] == 1
    assert found["data"] == [{"namespace": number, "present": 7, "broken_at": 0}]
    text = tutti("inspect", "--dir", disk, *words).stdout
    assert "prefix broken at page 0; 7 later pages unreachable" in text
    assert parsed("inspect", "--dir", disk, *words[2:])["exit_code"] == 0
    assert parsed("inspect", "--dir", disk, "--key", "xyz")["exit_code"] == 2
