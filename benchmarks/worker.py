"""One contender in a process of its own: its CPU time, GIL and crashes are its own; it sleeps while others run."""

import hashlib
import multiprocessing
import os
import resource
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.backends import BATCH, Backend, File, Nixl, Tutti, drop_page_cache
from benchmarks.gil import GilSampler
from benchmarks.lmcache import LMCache
from benchmarks.pools import Shape, host_pool
from tutti_sglang.memory import view

BACKENDS: dict[str, type[Backend]] = {"tutti": Tutti, "file": File, "nixl": Nixl, "lmcache": LMCache}
ALONE_SECONDS = 0.2
BUSY_SECONDS = 4.0
"""Beside a busy thread no further batch begins after so long: some backends keep 1 % of their rate there."""
PATIENCE = 900.0
LOG = "log"


class Case(NamedTuple):
    """What a contender works on: `pages` pages of `shape`, of which only `busy_pages` beside a busy thread."""

    kind: str
    options: dict[str, Any]
    directory: Path
    shape: Shape
    pages: int
    busy_pages: int
    layout: str
    seed: int


class Spinner(threading.Thread):
    """A thread that is busy with Python, as SGLang's scheduler is; counts its turns."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.turns, self.stopped = 0, False
        self.start()

    def run(self) -> None:
        """Count, in pure Python, until stopped."""
        while not self.stopped:
            value = 0
            for step in range(100):
                value = (value + step) & 0xFFFF
            self.turns += 1

    def speed(self, work: Callable[[], None]) -> float:
        """Turns per second while `work` runs."""
        turns, start = self.turns, time.perf_counter()
        work()
        return (self.turns - turns) / (time.perf_counter() - start)

    def stop(self) -> None:
        """End the thread."""
        self.stopped = True
        self.join()


class Bench:
    """Two stores of one backend over one host pool: `reader` is laid out once, `writer` is filled in each round."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.pool = host_pool(case.shape, case.pages, case.layout)
        self._memory = view(self.pool.kv_buffer.data_ptr(), self.pool.kv_buffer.nbytes)
        random = np.random.default_rng(case.seed)
        self._expected = random.integers(0, 1 << 64, len(self._memory) // 8, dtype=np.uint64).view(np.uint8)
        self._memory[:] = self._expected
        self._generation = 0
        self._stored = self._keys()
        self.reader = self._open("get")
        self.writer = self._open("put")
        self._move(self.reader.put, self._stored)
        self.reader.settle()

    def describe(self) -> str:
        """Which way the backend's bytes go."""
        return self.reader.describe()

    def measure(self, operation: str, beside: str) -> dict[str, Any]:
        """A row of `put`, `get` (cold), `hot` or `mixed`: `idle`, beside a `busy` thread or by the `gil` sampler."""
        pages, patience = (self.case.busy_pages, BUSY_SECONDS) if beside == "busy" else (self.case.pages, float("inf"))
        prepare, run = {
            "put": (self._nothing, self._put),
            "get": (self._chill, self._get),
            "hot": (self._blank, self._get),
            "mixed": (self._chill, self._both),
        }[operation]
        row: dict[str, Any] = {"operation": operation, "beside": beside}
        if operation == "put":
            self._warm(pages, patience)
        prepare(row)
        watch = {"idle": _watch_cpu, "busy": _watch_busy, "gil": _watch_gil}[beside]
        row |= watch(lambda: run(pages, row, patience))
        row["bytes"] = (row.get("read", 0) + row.get("written", 0)) * self.case.shape.page_bytes
        if operation != "put":
            self._verify(row["read"])
        if operation in ("put", "mixed"):
            self.writer.clear()
        return row

    def close(self) -> None:
        """Close both stores and remove their files."""
        self.reader.close()
        self.writer.close()
        shutil.rmtree(self.case.directory, ignore_errors=True)

    def _open(self, name: str) -> Backend:
        directory = self.case.directory / name
        directory.mkdir(parents=True)
        return BACKENDS[self.case.kind](directory, self.pool, self.case.options)

    def _keys(self) -> list[str]:
        """A fresh chain of page hashes."""
        self._generation += 1
        head = f"{self.case.seed}/{self._generation}/"
        return [hashlib.sha256(f"{head}{i}".encode()).hexdigest() for i in range(self.case.pages)]

    def _move(self, batch: Callable[[list[str], Any], bool], keys: list[str], patience: float = float("inf")) -> int:
        """How many pages were moved, batch by batch, until `patience` seconds were over."""
        import torch

        size, until = self.case.shape.page_size, time.perf_counter() + patience
        indices = torch.arange(len(keys) * size)
        for start in range(0, len(keys), BATCH):
            if start and time.perf_counter() > until:
                return start
            some = keys[start : start + BATCH]
            assert batch(some, indices[start * size : (start + len(some)) * size]), f"{self.case.kind} refused a batch"
        return len(keys)

    def _put(self, pages: int, row: dict[str, Any], patience: float) -> None:
        keys = self._keys()[:pages]
        start = time.perf_counter()
        row["written"] = self._move(self.writer.put, keys, patience)
        row["seconds_accepted"] = time.perf_counter() - start
        self.writer.settle()
        row["seconds"] = time.perf_counter() - start

    def _get(self, pages: int, row: dict[str, Any], patience: float) -> None:
        keys = self._stored[:pages]
        start = time.perf_counter()
        found = self.reader.exists(keys)
        row["seconds_lookup"] = time.perf_counter() - start
        assert found == pages, f"{self.case.kind} found {found} of {pages} pages"
        row["read"] = self._move(self.reader.get, keys, patience)
        row["seconds"] = time.perf_counter() - start

    def _both(self, pages: int, row: dict[str, Any], patience: float) -> None:
        failed: list[BaseException] = []
        written: dict[str, Any] = {}

        def put() -> None:
            try:
                self._put(pages, written, patience)
            except BaseException as error:  # noqa: BLE001 — handed to the main thread
                failed.append(error)

        start = time.perf_counter()
        thread = threading.Thread(target=put)
        thread.start()
        self._get(pages, row, patience)
        thread.join()
        row["seconds"] = time.perf_counter() - start
        if failed:
            raise failed[0]
        row["written"] = written["written"]

    def _warm(self, pages: int, patience: float) -> None:
        """Put once without a clock: hosts of virtual machines take memory back that was not used for a second or two,
        and give it back at half a GB/s."""
        self._put(pages, {}, patience)
        self.writer.clear()

    def _nothing(self, row: dict[str, Any]) -> None:
        """What is put is in the pool already."""

    def _blank(self, row: dict[str, Any]) -> None:
        """Nothing of what is read may be there before."""
        self._memory[:] = 0

    def _chill(self, row: dict[str, Any]) -> None:
        self._memory[:] = 0 if row["operation"] == "get" else self._expected
        row["cached_bytes"] = drop_page_cache(self.reader.directory)

    def _verify(self, pages: int) -> None:
        """Every byte that was asked for is there; then the pool is made whole again."""
        import torch

        pointers, sizes = self.pool.get_page_buffer_meta(torch.arange(pages * self.case.shape.page_size))
        base = self.pool.kv_buffer.data_ptr()
        for pointer, size in zip(pointers, sizes, strict=True):
            place = slice(pointer - base, pointer - base + size)
            assert np.array_equal(self._memory[place], self._expected[place]), (
                f"{self.case.kind} read other bytes than it wrote"
            )
        self._memory[:] = self._expected


def _watch_cpu(work: Callable[[], None]) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_user": after.ru_utime - before.ru_utime, "cpu_system": after.ru_stime - before.ru_stime}


def _watch_busy(work: Callable[[], None]) -> dict[str, Any]:
    spinner = Spinner()
    try:
        alone = spinner.speed(lambda: time.sleep(ALONE_SECONDS))
        return {"turns_alone": alone, "turns_beside": spinner.speed(work)}
    finally:
        spinner.stop()


def _watch_gil(work: Callable[[], None]) -> dict[str, Any]:
    with GilSampler() as sampler:
        work()
    if sampler.result is None:
        return {"gil_unknown": sampler.reason}
    return {"gil_held": sampler.result.held, "gil_looks": sampler.result.samples}


class Worker:
    """The handle of a Bench in another process. Every call raises RuntimeError with that process's own traceback."""

    def __init__(self, case: Case) -> None:
        self._case = case
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.worker", "sglang.srt.mem_cache.pool_host.mha"])
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, case), daemon=True)
        self._process.start()
        end.close()
        self.description: str = self._answer("opening")

    def measure(self, operation: str, beside: str) -> dict[str, Any]:
        """See Bench.measure."""
        self._pipe.send((operation, beside))
        row: dict[str, Any] = self._answer(f"{operation} {beside}")
        return row

    def close(self) -> None:
        """End the process, with what it wrote removed where it still can."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(60)
        self._process.kill()

    def _answer(self, what: str) -> Any:
        if not self._pipe.poll(PATIENCE):
            self._process.kill()
            raise RuntimeError(f"{self._case.kind} did not end within {PATIENCE:.0f} s: {what}")
        try:
            good, answer = self._pipe.recv()
        except EOFError:
            last = (self._case.directory / LOG).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self._case.kind} died: {what}: {last}") from None
        if not good:
            raise RuntimeError(f"{what}: {answer}")
        return answer


def _serve(pipe: Connection, case: Case) -> None:
    case.directory.mkdir(parents=True)
    log = os.open(case.directory / LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)  # the libraries of some backends write much, from C++
    os.dup2(log, 2)
    try:
        bench = Bench(case)
        pipe.send((True, bench.describe()))
        while request := pipe.recv():
            pipe.send((True, bench.measure(*request)))
        bench.close()
    except Exception:  # noqa: BLE001 — the parent reports it
        pipe.send((False, traceback.format_exc()))
