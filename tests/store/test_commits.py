"""Whether anything was committed is known without a statement, and SQLite's locks are left alone."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tutti_sglang.store import commits
from tutti_sglang.store.commits import Commits


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute("create table if not exists t (x)")
    return connection


def in_another_process(path: Path, statement: str) -> str:
    script = f"import sqlite3; print(*sqlite3.connect({str(path)!r}, timeout=0).execute({statement!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("where", ["here", "in another process"])
def test_each_commit_changes_the_header_and_no_read_does(tmp_path: Path, where: str) -> None:
    path = tmp_path / "db"
    watched, other = connect(path), connect(path)
    seen = Commits(path)
    known = {seen.header()}
    assert None not in known
    for number in range(8):
        other.execute("select count(*) from t").fetchone()
        watched.execute("select count(*) from t").fetchone()
        assert seen.header() in known
        if number % 3 == 2:  # the log begins anew
            other.execute("pragma wal_checkpoint(truncate)")
        before = seen.header()
        if where == "here":
            other.execute("insert into t values (1)")
        else:
            in_another_process(path, "pragma user_version")
            script = (
                f"import sqlite3; c = sqlite3.connect({str(path)!r}); c.execute('insert into t values (1)'); c.commit()"
            )
            subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
        after = seen.header()
        assert after is not None
        assert after != before
        assert after not in known
        known.add(after)


def test_locks_are_held_as_before(tmp_path: Path) -> None:
    path = tmp_path / "db"
    connection = connect(path)
    connection.execute("begin immediate")
    for _ in range(3):
        assert Commits(path).header()
    assert "locked" in in_another_process(path, "begin immediate")
    connection.execute("rollback")
    assert "locked" not in in_another_process(path, "begin immediate")


def test_what_cannot_be_said_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    assert Commits(path).header() is None
    connection = connect(path)
    seen = Commits(path)
    assert seen.header()
    monkeypatch.setattr(commits, "_VERSION", (b"\1\0\0\0",))
    assert seen.header() is None
    monkeypatch.undo()
    with path.with_name("db-shm").open("r+b") as half:  # this process holds no locks now
        half.seek(60)
        half.write(b"\xff")
    assert seen.header() is None
    connection.close()
    assert seen.header() is None
