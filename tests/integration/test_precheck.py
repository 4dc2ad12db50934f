"""A look at the store before the launch: what opening it would raise, and nothing else."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from tutti_sglang.config import Config, load_config
from tutti_sglang.errors import CapacityError, ForeignStoreError, StoreError
from tutti_sglang.integration import precheck


def _config(directory: Path, **more: Any) -> Config:
    settings = {"storage_dirs": [str(directory)], "max_size": "8MiB", "segment_size": "2MiB", "min_free_space": 1}
    return load_config(settings | more, {}).config


def test_a_store_that_opens_is_made_and_left(disk: Path) -> None:
    precheck.open_once(_config(disk / "store"))
    precheck.open_once(_config(disk / "store", engine="gds"))  # in a process that has no device
    assert (disk / "store" / "TUTTI").exists()
    assert not list((disk / "store" / "owners").iterdir())


def test_what_opening_raises_is_raised_here(disk: Path) -> None:
    (disk / "photo.jpg").write_bytes(b"x")
    with pytest.raises(ForeignStoreError, match=r"photo\.jpg.*empty or new directory"):
        precheck.open_once(_config(disk))
    with pytest.raises(StoreError, match="not a directory"):
        precheck.open_once(_config(disk / "photo.jpg"))
    with pytest.raises(CapacityError, match="min_free_space"):
        precheck.open_once(_config(disk / "store", min_free_space="900TiB"))


def test_a_check_that_cannot_run_stops_nobody(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for broken in ("import sys; sys.exit(1)", "print('no JSON')"):
        monkeypatch.setattr(precheck, "_CODE", broken)
        precheck.open_once(_config(disk / "store"))
    monkeypatch.setattr(sys, "executable", str(disk / "absent"))
    precheck.open_once(_config(disk / "store"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
