"""Many processes on one store: ranks, replicas, containers; one that crashes, one that is stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.store.kit import (
    MIB,
    SLOTS,
    close_good,
    eventually,
    get,
    lookup,
    namespace,
    open_store,
    put,
    segment_files,
    soon,
    store_pages,
    value,
)

ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, random, sys, time
from pathlib import Path
from tests.store.kit import *
disk = Path(sys.argv[1])
def say(*words):
    print(*words, flush=True)
def wait(*_):
    return sys.stdin.readline()
"""


class Peer(subprocess.Popen[str]):
    """Another process with a script of its own; it says lines and waits for lines."""

    def __init__(self, disk: Path, script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> None:
        command = [*prefix, sys.executable, "-c", PRELUDE + script, str(disk), *map(str, arguments)]
        super().__init__(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> str:
        """Its next line."""
        assert self.stdout
        line = self.stdout.readline().strip()
        assert line, f"the peer ended with {self.wait(10)}"
        return line

    def tell(self, line: str = "") -> None:
        """Let it go on."""
        assert self.stdin
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def end(self) -> None:
        """It must end by itself, and well."""
        assert self.wait(60) == 0


@contextmanager
def peers(disk: Path, count: int, script: str, *arguments: object) -> Iterator[list[Peer]]:
    """Peers that are not left behind."""
    found = [Peer(disk, script, *arguments, number) for number in range(count)]
    try:
        yield found
    finally:
        for peer in found:
            if peer.poll() is None:
                peer.kill()
                peer.wait()
            for pipe in (peer.stdin, peer.stdout):
                if pipe:
                    pipe.close()


WORK = """
store = open_store(disk, max_size=4 * MIB)
ns = store.attach(namespace())
random.seed(int(sys.argv[-1]))
say("ready"); wait()
hits = 0
for _ in range(40):
    start = random.randrange(400)
    put(store, ns, *range(start, start + 20))
    hits += sum(get(store, ns, *range(start, start + 20)))
assert store.drain(20)
assert value(store, "tutti_call_errors") == 0
assert store.close(20)
say(hits)
"""


def test_processes_that_put_and_get_the_same_pages_never_see_wrong_bytes(disk: Path) -> None:
    with peers(disk, 4, WORK) as found:
        for peer in found:
            peer.hear()
        for peer in found:
            peer.tell()
        hits = [int(peer.hear()) for peer in found]
        for peer in found:
            peer.end()
    assert all(hits)
    assert len(segment_files(disk)) <= 4
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    claimed = lookup(store, ns, *range(420))
    assert get(store, ns, *range(420)) == claimed
    assert any(claimed)
    close_good(store)


def test_processes_that_open_a_new_store_at_once_share_it(disk: Path) -> None:
    script = """
store = open_store(disk / "a", disk / "b", index_dir=str(disk / "index"))
ns = store.attach(namespace())
number = int(sys.argv[-1])
store_pages(store, ns, *range(10 * number, 10 * number + 10))
say("stored"); wait()
assert all(get(store, ns, *range(40)))
assert store.close()
"""
    with peers(disk, 4, script) as found:
        for peer in found:
            peer.hear()
        for peer in found:
            peer.tell()
        for peer in found:
            peer.end()
    store = open_store(disk / "a", disk / "b", index_dir=str(disk / "index"))
    assert all(get(store, store.attach(namespace()), *range(40)))
    close_good(store)


def test_all_processes_together_stay_within_max_size_and_keep_what_is_newest(disk: Path) -> None:
    script = """
store = open_store(disk, max_size=6 * MIB)
ns = store.attach(namespace())
first = 1000 * int(sys.argv[-1])
say("ready"); wait()
for start in range(first, first + 4 * SLOTS, 8):
    put(store, ns, *range(start, start + 8)); assert store.drain(20)
say(sum(get(store, ns, *range(first + 4 * SLOTS - 16, first + 4 * SLOTS))))
wait()
assert store.close()
"""
    with peers(disk, 3, script) as found:
        for peer in found:
            peer.hear()
        for peer in found:
            peer.tell()
        hits = [int(peer.hear()) for peer in found]
        sizes = [os.stat(file).st_size for file in segment_files(disk)]
        for peer in found:
            peer.tell()
            peer.end()
    assert 5 * MIB <= sum(sizes) <= 6 * MIB
    assert sum(hits) > 0
    close_good(open_store(disk, max_size=6 * MIB))


def test_one_writes_and_all_read(disk: Path) -> None:
    """Replicated KV: the other ranks find what one rank has put."""
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(50))
    script = """
store = open_store(disk)
ns = store.attach(namespace())
assert all(put(store, ns, *range(50))) and store.drain(8)
assert value(store, "tutti_bytes", op="write") == 0, "it is there already"
assert all(get(store, ns, *range(50)))
assert store.close()
"""
    with peers(disk, 3, script) as found:
        for peer in found:
            peer.end()
    close_good(store)


KILLED = """
store = open_store(disk, max_size=4 * MIB)
ns = store.attach(namespace())
say("ready")
start = 0
while True:
    put(store, ns, *range(start, start + 13))
    start = (start + 13) % 1000
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_loses_no_slot(disk: Path, seed: int) -> None:
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    with peers(disk, 1, KILLED) as (peer,):
        peer.hear()
        time.sleep(0.1 + 0.15 * seed)
        peer.kill()
        peer.wait()
    assert eventually(lambda: store._parts.index.lessees() <= {store._parts.owners.uuid})
    report = store.verify()
    assert (report.lost, report.double, report.stray, report.damaged) == (0, 0, 0, 0)
    assert eventually(lambda: not list((disk / "segments").glob(".new-*")) or store.verify(repair=True))
    assert get(store, ns, *range(1000)) == lookup(store, ns, *range(1000))
    # Twice at need: in a store of four groups, what keeps it below its watermark may take the newest one.
    fresh = range(5000, 5000 + SLOTS)
    assert eventually(lambda: all(put(store, ns, *fresh)) and store.drain(8) and all(get(store, ns, *fresh)))
    close_good(store)


@pytest.mark.parametrize("seed", range(3))
def test_a_stopped_process_costs_the_others_at_most_failed_puts(disk: Path, seed: int) -> None:
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(3000, 3010))
    with peers(disk, 1, KILLED) as (peer,):
        peer.hear()
        for turn in range(4):
            time.sleep(0.05 + 0.07 * seed)
            peer.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            put(store, ns, *range(2000 + 20 * turn, 2020 + 20 * turn))
            get(store, ns, *range(3000, 3010))
            lookup(store, ns, *range(1000))
            assert time.monotonic() - began < 10
            store.drain(30)
            peer.send_signal(signal.SIGCONT)
    assert value(store, "tutti_call_errors") == 0
    assert eventually(lambda: all(put(store, ns, *range(7000, 7010))) and store.drain(8) and _there(store, ns))
    assert store.verify(repair=True).damaged == 0
    close_good(store)


def _there(store: object, ns: int) -> bool:
    return all(get(store, ns, *range(7000, 7010)))  # type: ignore[arg-type]


def test_a_reader_stopped_for_longer_than_the_grace_never_returns_other_bytes(disk: Path) -> None:
    """It is stopped between its look into the index and its read; meanwhile its slots are given to others."""
    script = """
from tutti_sglang.store.reader import Reader
store = open_store(disk, max_size=MIB, grace_seconds=0.5)
ns = store.attach(namespace())
read = Reader.read
def slowly(self, request, *more):
    say("reading"); wait()
    return read(self, request, *more)
Reader.read = slowly
found = get(store, ns, *range(20))
say(sum(found), sum(int(value(store, "tutti_missed_objects", reason=reason)) for reason in ("grace", "changed")))
assert store.close()
"""
    store = open_store(disk, max_size=MIB, grace_seconds=0.5)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    with peers(disk, 1, script) as (peer,):
        assert peer.hear() == "reading"
        peer.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        for start in range(100, 300, 20):
            put(store, ns, *range(start, start + 20))
            assert store.drain(8)
        assert any(get(store, ns, *range(280, 300)))
        peer.send_signal(signal.SIGCONT)
        peer.tell()
        found, missed = map(int, peer.hear().split())
        assert found == 0
        assert missed > 0
        peer.end()
    close_good(store)


def test_two_containers_with_equal_process_ids_share_a_store(disk: Path) -> None:
    """A pid means nothing to the other: alive is who holds its lock."""
    container = ("unshare", "-p", "-f", "--mount-proc")
    if subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("unshare -p needs root here")
    script = """
store = open_store(disk, max_size=4 * MIB)
ns = store.attach(namespace())
first = 100 * int(sys.argv[-1])
store_pages(store, ns, *range(first, first + 20))
say(os.getpid()); wait()
assert all(get(store, ns, *range(0, 20))) and all(get(store, ns, *range(100, 120)))
store._upkeep.reclaim()
put(store, ns, *range(first + 20, first + 60)); assert store.drain(8)
assert all(get(store, ns, *range(first, first + 60)))
say("done"); wait()
"""
    found = [Peer(disk, script, number, prefix=container) for number in range(2)]
    try:
        pids = [peer.hear() for peer in found]
        assert pids[0] == pids[1]
        for peer in found:
            peer.tell()
        for peer in found:
            assert peer.hear() == "done"
        store = open_store(disk, max_size=4 * MIB)
        assert len(store._parts.owners.live()) == 3
        assert store.close()
    finally:
        for peer in found:
            peer.kill()
            peer.communicate()
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    assert eventually(lambda: len(store._parts.owners.live()) == 1 and not store._parts.owners.dead())
    assert all(get(store, ns, *range(60)))
    close_good(store)


def test_writers_of_one_key_never_mix_their_bytes(disk: Path) -> None:
    """Two processes with threads put one key with different contents (B103): whoever wins, the object is whole."""
    script = """
import threading
import numpy as np
tensors = (262144,)
store = open_store(disk, max_size=4 * MIB)
ns = store.attach(namespace(tensors=tensors))
def work(value):
    pages = Pages(1, tensors)
    for turn in range(15):
        pages.bytes[:] = value
        store.put(ns, keys(turn), pages.rows, soon())
        store.drain(8)
        pages.bytes[:] = 0
        if store.get(ns, keys(turn), pages.rows, soon()).all():
            assert len(np.unique(pages.bytes)) == 1 and pages.bytes[0, 0] > 0
threads = [threading.Thread(target=work, args=(10 * int(sys.argv[-1]) + number + 1,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert value(store, "tutti_missed_objects", reason="checksum") == 0
assert store.close()
"""
    with peers(disk, 2, script) as found:
        for peer in found:
            peer.end()
    close_good(open_store(disk, max_size=4 * MIB))


def test_few_descriptors_are_enough(disk: Path) -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
store = open_store(disk, max_size=100 * MIB)
ns = store.attach(namespace())
for start in range(0, 60 * SLOTS, SLOTS):
    assert all(put(store, ns, *range(start, start + SLOTS))) and store.drain(20)
assert len(segment_files(disk)) > 50
for stride in (1, 7, 60):
    for start in range(0, 60 * SLOTS, SLOTS):
        pages = sorted({(start + stride * each) % (60 * SLOTS) for each in range(8)})
        assert all(get(store, ns, *pages))
    assert len(os.listdir("/proc/self/fd")) < 50
assert value(store, "tutti_put_objects", outcome="dropped") == 0
close_good(store)
"""
    with peers(disk, 1, script) as (peer,):
        peer.end()


def test_what_another_process_dropped_is_closed_here_too(disk: Path) -> None:
    """A dropped segment's space comes back only when the last process has closed it."""
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(4 * SLOTS))
    assert all(get(store, ns, *range(4 * SLOTS)))
    other = open_store(disk, max_size=MIB)

    def held() -> int:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        names = [os.readlink(link) for link in links if os.path.islink(link)]
        return sum(name.startswith(str(disk)) and "(deleted)" in name for name in names)

    assert eventually(lambda: held() == 0)
    assert get(store, ns, *range(4 * SLOTS)) == lookup(store, ns, *range(4 * SLOTS))
    assert other.close()
    close_good(store)


def test_a_get_returns_in_time_while_the_index_is_locked_by_a_stopped_process(disk: Path) -> None:
    script = """
import sqlite3
connection = sqlite3.connect(disk / "index.db", isolation_level=None)
connection.execute("begin immediate")
say("locked"); wait()
"""
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(20))
    with peers(disk, 1, script) as (peer,):
        peer.hear()
        began = time.monotonic()
        assert all(get(store, ns, *range(20)))
        assert all(lookup(store, ns, *range(20)))
        assert all(put(store, ns, *range(20, 30)))
        assert time.monotonic() - began < 5
        assert all(get(store, ns, *range(20, 30))), "accepted objects are served meanwhile"
        assert store.clear(ns) >= 0
        assert time.monotonic() - began < 9
        assert soon(0) - began < 10
    assert store.close()
