"""Writers are killed at random points. After each round every object that is there is byte-equal to what was put, every
slot is in one state, and nothing is left behind. CI runs a share, `python -m tests.store.test_crash --rounds 500` all.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.store.kit import MIB, close_good, eventually, get, lookup, namespace, open_store, put

PAGES = 400
MAX_SIZE = 3 * MIB
ROUNDS_IN_CI = 16


def write(homes: list[str], seed: int, ready: Connection) -> None:
    """Open the store and use it until somebody kills the process; now and then close it and open it again."""
    rng = random.Random(seed)
    ready.send("before the store is opened")
    stored = False
    while True:
        store = open_store(*map(Path, homes), max_size=MAX_SIZE, fsync=rng.choice(["none", "none", "batch"]))
        spaces = [store.attach(namespace(model)) for model in "ab"]
        if not stored:
            put(store, spaces[0], *range(rng.randint(1, 30)))
            store.drain(20)
            ready.send("with something stored")
            stored = True
        for _ in range(rng.randint(1, 60)):
            ns, start = rng.choice(spaces), rng.randrange(PAGES)
            pages = range(start, min(PAGES, start + rng.randint(1, 30)))
            match rng.randrange(12):
                case 0:
                    store.clear(ns)
                case 1 | 2 | 3:
                    get(store, ns, *pages)
                case 4:
                    store.drain(1)
                case _:
                    put(store, ns, *pages)
        store.close()


def crash(homes: list[Path], rng: random.Random) -> None:
    """Let one to three writers run for a moment and kill them, one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.kit"])
    names = [str(home) for home in homes]
    pipes = [context.Pipe(duplex=False) for _ in range(rng.randint(1, 3))]
    writers = [context.Process(target=write, args=(names, rng.getrandbits(32), sender)) for _, sender in pipes]
    for writer, (_, sender) in zip(writers, pipes, strict=True):
        writer.start()
        sender.close()
    try:
        for writer, (receiver, _) in zip(writers, pipes, strict=True):
            for _ in range(rng.choice([1, 2, 2])):
                assert receiver.poll(60)
                receiver.recv()
            time.sleep(rng.choice([0.02, 0.2, 0.6]) * rng.random())
            assert writer.pid
            os.kill(writer.pid, signal.SIGKILL)
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
        for receiver, _ in pipes:
            receiver.close()


def check(homes: list[Path]) -> tuple[float, int]:
    """The store is whole. Seconds that opening it took, and objects that were in it."""
    began = time.perf_counter()
    store = open_store(*homes, max_size=MAX_SIZE)
    took = time.perf_counter() - began
    assert store._parts.owners.dead() == []
    assert store._parts.index.lessees() <= {store._parts.owners.uuid}
    report = store.verify()
    assert (report.lost, report.double, report.stray, report.damaged, report.files) == (0, 0, 0, 0, 0), report
    for model in "ab":
        ns = store.attach(namespace(model))
        claimed = lookup(store, ns, *range(PAGES))
        assert get(store, ns, *range(PAGES)) == claimed
    close_good(store)
    for home in homes:
        files = list((home / "segments").glob("*.seg"))
        assert sum(os.stat(file).st_size for file in files) <= MAX_SIZE
        assert len(os.listdir(home / "segments")) == len(files) + 1, "no draft is left"
    return took, report.objects


def run(disk: Path, rounds: int, seed: int) -> list[tuple[float, int]]:
    """Crash and check; what `check` said after each round."""
    rng = random.Random(seed)
    homes = [disk / "a", disk / "b"][: 1 + seed % 2]
    found = []
    for number in range(rounds):
        crash(homes, rng)
        try:
            found.append(check(homes))
        except AssertionError as error:
            raise AssertionError(f"round {number} of seed {seed}") from error
    assert sum(objects for _, objects in found) > rounds, "the writers were killed before they did anything"
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_writers_leave_a_whole_store(disk: Path, seed: int) -> None:
    run(disk, ROUNDS_IN_CI // 2, seed)
    store = open_store(disk / "a", *[disk / "b"] * (seed % 2), max_size=MAX_SIZE)
    ns = store.attach(namespace("a"))
    assert eventually(lambda: all(put(store, ns, *range(1000, 1020))) and store.drain(8) and _there(store, ns))
    close_good(store)


def _there(store: object, ns: int) -> bool:
    return all(get(store, ns, *range(1000, 1020)))  # type: ignore[arg-type]


def main() -> None:
    """All rounds, in pieces of 50, each with a store and a seed of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + -(-options.rounds // 50)):
        disk = Path(tempfile.mkdtemp(prefix="tutti-", dir="/var/tmp"))
        try:
            found = run(disk, min(50, options.rounds), seed)
        finally:
            shutil.rmtree(disk)
        opened, objects = sorted(took for took, _ in found), sum(objects for _, objects in found) // len(found)
        times = f"{1e3 * opened[len(opened) // 2]:.0f} ms, at most {1e3 * opened[-1]:.0f}"
        print(f"seed {seed}: {len(found)} rounds, about {objects} objects; opened in {times}")


if __name__ == "__main__":
    main()
