import ctypes
import random
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
