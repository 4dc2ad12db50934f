"""Rows in shared memory: each process its own, the dead do not count, whatever is wrong leaves a process on its own."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti_sglang.engine.rows import DRIVES, PID, ROWS, SHARED, WORDS, WRITES, Rows, word

AT = word(0, WRITES)


@pytest.fixture
def store() -> Iterator[str]:
    """A name that no other store has."""
    name = uuid.uuid4().hex
    yield name
    (SHARED / f"tutti-{name}.gate").unlink(missing_ok=True)


def _other(store: str) -> "subprocess.Popen[str]":
    """A process with a row in which a write is in flight."""
    code = f"""
        import sys, time
        from tutti_sglang.engine.rows import Rows
        rows = Rows({store!r})
        assert not rows.why_alone, rows.why_alone
        rows.set({AT}, 7)
        print(rows.own, flush=True)
        sys.stdin.read()
        rows.close()
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout
    assert process.stdout.readline().strip()
    return process


def _later(rows: Rows) -> int:
    """A moment at which the rows look for others again."""
    now = time.monotonic_ns()
    rows.look(now - 10**12)
    rows.look(now)
    return now


def test_a_process_sees_what_others_write_until_they_die(store: str) -> None:
    rows = Rows(store)
    other = _other(store)
    _later(rows)
    assert rows.others(AT) == [7]
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert rows.others(AT) == []
    rows.close()


def test_a_stopped_process_is_alive(store: str) -> None:
    rows = Rows(store)
    other = _other(store)
    os.kill(other.pid, signal.SIGSTOP)
    _later(rows)
    assert rows.others(AT) == [7]
    other.kill()
    other.wait()
    rows.close()


def test_the_row_of_a_dead_process_is_used_again_and_empty(store: str) -> None:
    other = _other(store)
    other.kill()
    other.wait()
    rows = Rows(store)
    assert rows.own == 0
    assert rows.get(AT) == 0
    assert rows.get(PID) == os.getpid()
    rows.close()


def test_the_last_one_to_leave_removes_the_file(store: str) -> None:
    path = SHARED / f"tutti-{store}.gate"
    first, second = Rows(store), Rows(store)
    assert first.own != second.own
    assert path.stat().st_mode & 0o777 == 0o600
    first.close()
    assert path.exists()
    second.close()
    second.close()
    assert not path.exists()
    assert second.others(AT) == []


def test_a_forked_child_does_not_keep_the_row_alive(store: str) -> None:
    rows, watcher = Rows(store), Rows(store)
    rows.set(AT, 3)
    _later(watcher)
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"!")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"!"
        assert watcher.others(AT) == [3]
        rows._leave()  # as if the parent had died
        assert watcher.others(AT) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    watcher.close()


def test_closing_gives_back_every_descriptor(store: str) -> None:
    before = os.listdir("/proc/self/fd")
    Rows(store).close()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("how", ["absent", "link", "readable", "directory", "full"])
def test_where_the_file_cannot_be_shared_the_process_is_on_its_own_and_says_why(tmp_path: Path, how: str) -> None:
    path = tmp_path / "tutti-s.gate"
    held = []
    match how:
        case "link":
            (tmp_path / "target").write_bytes(b"precious")
            path.symlink_to(tmp_path / "target")
        case "readable":
            path.touch(0o644)
        case "directory":
            path.mkdir()
        case "full":
            held = [Rows("s", tmp_path) for _ in range(ROWS)]
            assert not any(each.why_alone for each in held)
    rows = Rows("s", tmp_path / "absent" if how == "absent" else tmp_path)
    assert rows.why_alone
    rows.set(AT, 1)
    assert rows.get(AT) == 1
    rows.close()
    for each in held:
        each.close()
    if how == "link":
        assert (tmp_path / "target").read_bytes() == b"precious"


def test_what_killed_processes_left_goes_after_a_day_but_not_what_is_in_use(tmp_path: Path) -> None:
    used = Rows("used", tmp_path)
    left, fresh = tmp_path / "tutti-left.gate", tmp_path / "tutti-fresh.gate"
    for path in (left, fresh):
        path.touch(0o600)
    for path in (left, tmp_path / "tutti-used.gate"):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    Rows("new", tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tutti-fresh.gate", "tutti-used.gate"]
    used.close()


def test_every_drive_has_words_of_its_own_inside_the_row() -> None:
    places = [word(drive, which) for drive in range(DRIVES) for which in range(5)]
    assert len(set(places)) == len(places)
    assert max(places) < WORDS
    assert word(DRIVES, WRITES) == AT
