"""An owner lives as long as its process, and holds exactly the slots that it may still read."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti_sglang.errors import StoreError
from tutti_sglang.store import owners as module
from tutti_sglang.store.owners import Owners

ROOT = Path(__file__).parents[2]
GRACE = 60.0
_CODE = """
import os, sys, time
from pathlib import Path
from tutti_sglang.store.owners import Owners
owners = Owners(Path(sys.argv[1]))
with owners.reading(int(sys.argv[2]), 60):
    print(owners.uuid, os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    opened = Owners(tmp_path / "owners")
    yield opened
    opened.close()


class _Other:
    """Another process that is an owner and reads at an epoch."""

    def __init__(self, directory: Path, epoch: int, *prefix: str) -> None:
        command = [*prefix, sys.executable, "-c", _CODE, str(directory), str(epoch)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
        assert self.process.stdout
        self.uuid, self.pid = self.process.stdout.readline().decode().split() or ("", "")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[_Other]:
    started = _Other(tmp_path / "owners", 7)
    yield started
    if started.process.poll() is None:
        started.kill()


def test_an_owner_is_alive_until_it_leaves(tmp_path: Path, owners: Owners) -> None:
    second = Owners(tmp_path / "owners")
    assert set(owners.live()) == {owners.uuid, second.uuid}
    assert owners.alive(second.uuid)
    assert second.alive(owners.uuid)
    second.close()
    second.close()
    assert not owners.alive(second.uuid)
    assert (owners.live(), owners.dead()) == ([owners.uuid], [])


def test_a_killed_owner_is_dead_at_once_and_can_be_removed(owners: Owners, other: _Other) -> None:
    assert owners.alive(other.uuid)
    assert owners.dead() == []
    other.kill()
    assert not owners.alive(other.uuid)
    assert owners.dead() == [other.uuid]
    owners.remove(other.uuid)
    owners.remove(other.uuid)
    assert owners.dead() == []


def test_a_stopped_owner_is_alive_and_holds_what_it_reads(owners: Owners, other: _Other) -> None:
    os.kill(other.process.pid, signal.SIGSTOP)
    assert owners.alive(other.uuid)
    assert owners.oldest_epoch(20, GRACE) == 7
    assert owners.oldest_epoch(20, 0.0) == 20, "a read beyond its grace holds nothing"
    os.kill(other.process.pid, signal.SIGCONT)


def test_a_dead_owner_holds_nothing(owners: Owners, other: _Other) -> None:
    assert owners.oldest_epoch(20, GRACE) == 7
    other.kill()
    assert owners.oldest_epoch(20, GRACE) == 20


def test_the_oldest_read_of_a_process_counts(owners: Owners) -> None:
    assert owners.oldest_epoch(9, GRACE) == 9
    with owners.reading(5, GRACE):
        with owners.reading(3, GRACE):
            assert owners.oldest_epoch(9, GRACE) == 3
        assert owners.oldest_epoch(9, GRACE) == 5
        with owners.reading(8, GRACE):
            assert owners.oldest_epoch(9, GRACE) == 5
    assert owners.oldest_epoch(9, GRACE) == 9


def test_nothing_is_passed_that_is_freed_after_the_question(owners: Owners) -> None:
    assert owners.oldest_epoch(9, GRACE) == 9
    with owners.reading(12, GRACE):
        assert owners.oldest_epoch(9, GRACE) == 9


def test_a_read_that_ended_by_an_error_holds_nothing(owners: Owners) -> None:
    with pytest.raises(KeyError), owners.reading(3, GRACE):
        raise KeyError
    assert owners.oldest_epoch(9, GRACE) == 9


def test_a_read_that_could_not_be_announced_holds_nothing(owners: Owners, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refused)
        with pytest.raises(OSError, match="Input"), owners.reading(3, GRACE):
            pytest.fail("a read that nobody knows of")
    with owners.reading(8, GRACE):
        assert owners.oldest_epoch(9, GRACE) == 8


def test_close_waits_for_a_read_that_is_just_ending(owners: Owners, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor's number would be another file's by the time it is written to."""
    inside, go = threading.Event(), threading.Event()
    pwrite, written = os.pwrite, []

    def slow(fd: int, data: bytes, offset: int) -> int:
        inside.set()
        go.wait(30)
        written.append(os.readlink(f"/proc/self/fd/{fd}"))
        return pwrite(fd, data, offset)

    def read() -> None:
        with contextlib.suppress(OSError), owners.reading(3, GRACE):
            pass

    monkeypatch.setattr(os, "pwrite", slow)
    reader = threading.Thread(target=read)
    closer = threading.Thread(target=owners.close)
    reader.start()
    assert inside.wait(30)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    with open(os.devnull):
        go.set()
        reader.join(30)
        closer.join(30)
    assert not closer.is_alive()
    assert owners.uuid in written[0]
    assert os.devnull not in written


def test_a_hung_read_does_not_take_the_protection_of_a_younger_one(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with owners.reading(3, GRACE) as hung:
        now += GRACE - 1
        with owners.reading(5, GRACE) as young:
            now += 2
            assert (hung.expired(GRACE), young.expired(GRACE)) == (True, False)
            assert owners.oldest_epoch(9, GRACE) <= 5
            with owners.reading(8, GRACE):
                assert owners.oldest_epoch(9, GRACE) == 5, "the hung read is left out from now on"
            now += GRACE
            assert owners.oldest_epoch(9, GRACE) == 9


def test_a_read_in_another_time_namespace_never_expires(owners: Owners) -> None:
    """Its clock may be offset: its age cannot be told."""
    with owners.reading(3, GRACE):
        assert owners.oldest_epoch(9, -1.0) == 9
        owners._zone += 1
        assert owners.oldest_epoch(9, -1.0) == 3


def test_an_owner_in_another_container_with_the_same_pid_is_told_apart(tmp_path: Path, owners: Owners) -> None:
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-p", "-f", "--mount-proc", "true"], capture_output=True).returncode:
        pytest.skip("this process may not make a PID namespace")
    contained = [_Other(tmp_path / "owners", epoch, unshare, "-p", "-f", "--mount-proc") for epoch in (4, 6)]
    assert contained[0].pid == contained[1].pid == "1"
    assert set(owners.live()) == {owners.uuid, contained[0].uuid, contained[1].uuid}
    assert owners.oldest_epoch(9, GRACE) == 4
    contained[0].kill()
    while owners.alive(contained[0].uuid):
        contained[0].process.wait(10)
    assert owners.dead() == [contained[0].uuid]
    assert owners.oldest_epoch(9, GRACE) == 6
    contained[1].kill()


def test_a_forked_child_does_not_keep_its_parent_alive(tmp_path: Path, owners: Owners) -> None:
    code = """
import os, sys, time
from pathlib import Path
from tutti_sglang.store.owners import Owners
owners = Owners(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print(owners.uuid, flush=True)
os._exit(0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "owners")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout
    uuid = process.stdout.readline().decode().strip()
    process.wait(30)
    deadline = time.monotonic() + 20  # the child may not have begun to run
    while owners.alive(uuid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not owners.alive(uuid)
    os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()


def test_what_was_never_finished_is_swept_later(tmp_path: Path) -> None:
    directory = tmp_path / "owners"
    directory.mkdir()
    old, young = directory / ".old", directory / ".young"
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    opened = Owners(directory)
    assert sorted(path.name for path in directory.iterdir()) == sorted([".young", opened.uuid])
    assert opened.dead() == []
    opened.close()


def test_owner_files_are_private_and_small(tmp_path: Path, owners: Owners) -> None:
    file = tmp_path / "owners" / owners.uuid
    assert file.stat().st_mode & 0o077 == 0
    assert file.stat().st_size < 512


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "owners").touch()
    with pytest.raises(StoreError, match="index_dir"):
        Owners(tmp_path / "owners")


def test_a_damaged_or_foreign_file_among_the_owners_does_no_harm(tmp_path: Path, owners: Owners) -> None:
    (tmp_path / "owners" / "note.txt").touch()
    (tmp_path / "owners" / ("0" * 32)).touch()
    (tmp_path / "owners" / ("1" * 32)).symlink_to("/etc/passwd")
    (tmp_path / "owners" / ("2" * 32)).mkdir()
    assert owners.oldest_epoch(9, GRACE) == 9
    assert owners.live() == [owners.uuid]
    assert owners.dead() == ["0" * 32]
    for name in owners.dead():
        owners.remove(name)
    assert owners.live() == [owners.uuid]


def test_a_process_without_descriptors_takes_nobody_for_dead(owners: Owners, other: _Other) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(used)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        for question in (owners.dead, owners.live, lambda: owners.oldest_epoch(9, GRACE)):
            with pytest.raises(OSError, match="open files"):
                question()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in spare:
            os.close(fd)
