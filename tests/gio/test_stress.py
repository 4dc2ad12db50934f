"""The protocol under load: many threads, few slots, counters that wrap, a controller that fails, loses and delays."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tutti_sglang.kernels import gio_native

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(gio_native.compiler() is None, reason="no C++ compiler")

IOS = int(os.environ.get("GIO_IOS", "20000"))  # sub-I/Os of each scenario; full size: 1000000
PLAIN = ("-O2",)
TSAN = ("-O1", "-g", "-fsanitize=thread")
SCENARIOS = {
    "plain": {},
    "one slot": {"log-entries": 1, "queues": 1},
    "full and wrapping": {"log-entries": 2, "queues": 1, "wrap": 1, "workers": 0},
    "PRP": {"log-entries": 6, "wrap": 1, "sgl": 0, "mdts": 4096},
    "errors": {"fail": 20000},
    "lost": {"log-entries": 6, "drop": 2000, "poll-ns": 2_000_000},
    "late": {"log-entries": 5, "delay": 200000, "delay-ns": 5_000_000, "poll-ns": 1_000_000},
    "twin": {"twin": 1, "threads": 2, "log-entries": 5, "fail": 10000, "delay": 50000, "cancel": 200000},
    "twin, lost": {"twin": 1, "threads": 3, "log-entries": 6, "drop": 1000, "poll-ns": 1_000_000},
    "everything": {"log-entries": 5, "fail": 10000, "drop": 1000, "delay": 50000, "poll-ns": 500_000},
    "joined": {"join": 16, "mdts": 65536, "log-entries": 3},
    "joined, errors and losses": {
        "join": 5,
        "mdts": 65536,
        "log-entries": 5,
        "fail": 50000,
        "drop": 5000,
        "poll-ns": 1_000_000,
    },
    "joined, twin": {
        "join": 128,
        "mdts": 1 << 20,
        "twin": 1,
        "threads": 2,
        "fail": 50000,
        "delay": 50000,
        "cancel": 200000,
    },
}


def _atomics(flags: tuple[str, ...]) -> Path | None:
    """ThreadSanitizer watches libcu++, as NVRTC compiles it; the plain build takes the standard's, as setup.py may."""
    return gio_native.cccl() if flags == TSAN else None


def _controller(folder: Path, flags: tuple[str, ...]) -> Path:
    """The controller as one object file."""
    output = folder / "controller.o"
    sources = (gio_native.FOLDER / "controller.cpp", gio_native.FOLDER / "controller_io.cpp")
    gio_native.compile_cpp(output, sources, *flags, "-r", headers=_atomics(flags))
    return output


def _build(folder: Path, headers: Path, controller: Path, flags: tuple[str, ...]) -> Path:
    output = folder / "stress"
    gio_native.compile_cpp(output, (HERE / "stress.cpp", controller), f"-I{headers}", *flags, headers=_atomics(flags))
    return output


def _run(program: Path, folder: Path, **options: int) -> subprocess.CompletedProcess[str]:
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = ["nice", str(program), str(folder / "segment"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300 + IOS / 500)


@pytest.fixture(scope="session")
def watched_controller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _controller(tmp_path_factory.mktemp("watched"), TSAN)


@pytest.fixture(scope="session", params=["plain build", "ThreadSanitizer"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stress")
    if request.param == "plain build":
        return _build(folder, gio_native.FOLDER, _controller(folder, PLAIN), PLAIN)
    return _build(folder, gio_native.FOLDER, request.getfixturevalue("watched_controller"), TSAN)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_byte_result_and_word_is_right(program: Path, tmp_path: Path, scenario: str) -> None:
    options = SCENARIOS[scenario]
    done = _run(program, tmp_path, **{"ios": IOS, "seed": 7, **options})
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert bool(summary["errors"]) == any(name in options for name in ("fail", "cancel"))
    assert bool(summary["dropped"]) == bool(options.get("drop"))
    assert bool(summary["delayed"]) == bool(options.get("delay"))


MUTATIONS = {
    "the entry before its phase": (
        "queue.cuh",
        "SystemRef<u32>(cqe.last).load(acquire)",
        "SystemRef<u32>(cqe.last).load(relaxed)",
    ),
    "the old entry before the ticket": ("queue.cuh", "fetch_add(1, acq_rel)", "fetch_add(1, relaxed)"),
    "the pieces before the result": ("sub_io.cuh", "done.fetch_add(1, acq_rel)", "done.fetch_add(1, relaxed)"),
    "the count before the completion": ("sub_io.cuh", "+ 1 < count) return", "+ 1 < iocb.count) return"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_missing_order_is_found(mutation: str, watched_controller: Path, tmp_path: Path) -> None:
    """The canaries of the test above: each takes one of the explained orders away."""
    file, right, wrong = MUTATIONS[mutation]
    headers = tmp_path / "gio"
    shutil.copytree(gio_native.FOLDER, headers)
    shutil.copy(gio_native.FOLDER.parent / "faults.hpp", tmp_path)
    text = (headers / file).read_text()
    assert text.count(right) == 1
    (headers / file).write_text(text.replace(right, wrong))
    program = _build(tmp_path, headers, watched_controller, TSAN)
    seeds = range(40)  # one in three shows it
    runs = (_run(program, tmp_path, **{"ios": 20000, "seed": seed, "log-entries": 2}) for seed in seeds)
    assert any(done.returncode for done in runs)
