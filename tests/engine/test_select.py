"""The engine is chosen by trying, and the line about it says what is in use and why."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.engine import cufile
from tutti_sglang.config import Config
from tutti_sglang.engine import select
from tutti_sglang.engine.select import create_engine
from tutti_sglang.engine.staging import Staging
from tutti_sglang.engine.uring import uring_refused
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import native
from tutti_sglang.metrics import Metrics

ROOT = Path(__file__).parents[2]
SEGMENT = 1 << 20

PROGRAM = """
import ctypes, errno, json, os, resource, struct, sys, time
forbid, limit, wanted = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if limit:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
if forbid:  # a seccomp profile of four instructions: io_uring_setup(2), 425 on every platform, answers `forbid`
    code = b"".join(struct.pack("HBBI", *each) for each in (
        (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | forbid), (0x06, 0, 0, 0x7FFF0000)))
    memory = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(memory)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
from prometheus_client import CollectorRegistry
import numpy as np
from tutti_sglang.config import Config
from tutti_sglang.engine import IOCTX_DTYPE, IoClass
from tutti_sglang.engine.select import create_engine
from tutti_sglang.engine.staging import Staging
from tutti_sglang.errors import EngineError
from tutti_sglang.metrics import Metrics
staging = Staging(8 << 20, Metrics(CollectorRegistry()))
try:
    engine, note = create_engine(Config(storage_dirs=("/x",), engine=wanted), 1 << 20, staging)
except EngineError as error:
    print(json.dumps([None, str(error), []]))
    sys.exit()
fd = os.memfd_create("segment")
os.ftruncate(fd, 1 << 20)
engine.attach(0, 0, fd)
extent = staging.acquire(64 << 10)
batch = np.zeros(16, IOCTX_DTYPE)
batch["address"] = extent.address + np.arange(16) * 4096
batch["offset"], batch["length"], batch["operation"] = np.arange(16) * 8192, 4096, np.arange(16) % 2
results = engine.wait(engine.submit(batch, IoClass.DEMAND, time.monotonic() + 60), 60)
assert engine.close(60)
print(json.dumps([engine.name, note, results.tolist()]))
"""


def in_a_process(*prefix: str, forbid: int = 0, memlock: int = 0, wanted: str = "auto") -> tuple[str | None, str]:
    """(engine, note) of a fresh process, after it has moved some bytes."""
    command = [*prefix, sys.executable, "-c", PROGRAM, str(forbid), str(memlock), wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    name, note, results = json.loads(done.stdout)
    assert results == ([4096] * 16 if name else [])
    return name, note


needs_library = pytest.mark.skipif(native.library() is None, reason=native.unavailable_reason())
needs_uring = pytest.mark.skipif(bool(uring_refused()), reason=uring_refused())


def make(engine: str) -> tuple[str, str]:
    staging = Staging(1 << 20, Metrics(CollectorRegistry()))
    made, note = create_engine(Config(storage_dirs=("/x",), engine=engine), SEGMENT, staging)
    assert made.close(10)
    return made.name, note


@needs_library
@needs_uring
@pytest.mark.parametrize("engine", ["auto", "uring"])
def test_io_uring_is_taken_where_it_works(engine: str) -> None:
    name, note = make(engine)
    assert name == "uring"
    assert note.startswith("io_uring, ")


def test_threads_are_taken_when_asked_for() -> None:
    assert make("threads") == ("threads", "Python threads, as configured")


def test_gds_is_made_where_it_is_asked_for_and_cufile_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.cufile", reason="cuda-python is not installed")

    def refuse(library: cufile.Library) -> None:
        raise cufile.Refused(5033)

    started = cufile.install(monkeypatch)
    assert make("gds")[0] == "gds"
    assert [library.open for library in started] == [False], "it was started, and closed with the engine"
    monkeypatch.setattr(cufile.Library, "driver_open", refuse)
    with pytest.raises(EngineError, match=r"does not start.*5033"):
        make("gds")


def test_without_the_library_python_threads_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.native, "library", lambda: None)
    monkeypatch.setattr(select.native, "unavailable_reason", lambda: "no compiler")
    assert make("auto") == ("threads", "Python threads: no compiler")
    with pytest.raises(EngineError, match=r"no compiler.*engine = auto"):
        make("uring")


@needs_library
@pytest.mark.parametrize(("error", "words"), [(1, "EPERM"), (38, "ENOSYS")])
def test_a_seccomp_profile_that_refuses_io_uring_costs_only_io_uring(error: int, words: str) -> None:
    name, note = in_a_process(forbid=error)
    assert name == "pool"
    assert note.startswith("native threads: ")
    assert words in note
    name, note = in_a_process(forbid=error, wanted="uring")
    assert name is None
    assert words in note
    assert "engine = auto" in note


@needs_library
@needs_uring
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv(1) is not installed")
def test_too_little_locked_memory_is_told_and_borne() -> None:
    name, note = in_a_process("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", memlock=64 << 10)
    assert name == "uring"
    assert note == "io_uring, of 8MiB staging 64KiB can be registered at most: raise `ulimit -l`"
