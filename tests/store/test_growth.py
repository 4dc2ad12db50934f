"""A segment is there with all of its files, or not at all."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.store.kit import close_good, eventually, get, namespace, open_store, put, segment_files, value
from tutti_sglang.store import health, writer


def test_a_segment_whose_file_a_drive_will_not_name_is_given_up_at_once(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(writer, "TICK_SECONDS", 0.02)
    store = open_store(disk / "a", disk / "b", index_dir=str(disk / "index"))
    ns = store.attach(namespace())
    rename, calls = os.rename, []

    def refuse_the_second(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", refuse_the_second)
    assert all(put(store, ns, *range(10)))
    assert store.drain(8)
    assert value(store, "tutti_io_errors", op="create", kind="EIO") == 1
    assert value(store, "tutti_put_objects", outcome="dropped") == 10
    assert not store._parts.index.segments()
    assert not segment_files(disk / "a")
    assert not segment_files(disk / "b")
    assert all(put(store, ns, *range(10)))
    assert store.drain(8)
    assert all(get(store, ns, *range(10)))
    assert eventually(lambda: store.stats().drives_in_service == 2)
    close_good(store)
