import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import xxhash

from tutti_sglang.kernels import native

HOST = Path(native.__file__).resolve().parent / "host"


@pytest.fixture
def library() -> ctypes.CDLL:
    found = native.library()
    if found is None:
        pytest.skip(native.unavailable_reason())
    return found


@pytest.mark.parametrize(
    "lengths", [range(4097), random.Random(4).sample(range(4097, 1 << 20), 200)], ids=["short", "long"]
)
def test_xxh3_equals_the_xxhash_package(library, lengths):
    data = random.Random(3).randbytes(1 << 20)
    buffer = ctypes.create_string_buffer(data, len(data))
    address = ctypes.addressof(buffer)
    for length in lengths:
        start = length * 31 % (len(data) - length)
        expected = xxhash.xxh3_64_intdigest(memoryview(data)[start : start + length])
        assert library.tutti_xxh3(address + start, length) == expected, length


def test_a_library_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    library, reason = native._load.__wrapped__()
    assert library is None
    assert reason


def built(folder: Path, sources: list[str], sanitizer: str) -> Path:
    """A test program with all of the library in it, as one unit: the headers are read once."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", "-pthread"]
    command = [compiler, *flags, "-I", HOST, "-x", "c++", "-", "-o", folder / "test"]
    empty = subprocess.run(command, input=b"int main() {}", timeout=60)
    if empty.returncode:
        pytest.skip(f"{compiler} cannot link -fsanitize={sanitizer}")
    unit = "".join(f'#include "{path}"\n' for source in sources for path in sorted(HOST.glob(source)))
    done = subprocess.run(command, input=unit.encode(), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return folder / "test"


def clean(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_blocks_equal_the_definition_and_stay_in_their_rows(tmp_path):
    clean(built(tmp_path, ["blocks.cpp", "copy.cpp", "tests/blocks_test.cpp"], "address"))


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_the_engine_is_clean_under(tmp_path, sanitizer):
    clean(built(tmp_path, ["*.cpp", "tests/engine_test.cpp"], sanitizer), tmp_path, random.randrange(1000))
