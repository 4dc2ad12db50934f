"""The checksum has one value everywhere, and notices what happens to stored bytes."""

from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_sglang import checksum
from tutti_sglang.checksum import BLOCK, KEYS, copy_and_sum, finish, roots, sums
from tutti_sglang.kernels import native
from tutti_sglang.memory import check_rows
from tutti_sglang.testing.damage import Damage, host_sums, inflict, main, undetected
from tutti_sglang.testing.guard import GuardedRegion
from tutti_sglang.testing.vectors import ROOT_VECTOR, TENSOR_VECTORS, pattern

MASK = 2**64 - 1

Summing = Callable[..., checksum.Sums]
Copying = Callable[..., checksum.Sums]


def by_the_book(data: bytes) -> int:
    """The definition, word by word."""
    padded = data + bytes(-len(data) % BLOCK)
    blocks = []
    for start in range(0, len(padded), BLOCK):
        total = 0
        for word in range(BLOCK // 8):
            w = int.from_bytes(padded[start + 8 * word : start + 8 * word + 8], "little")
            x = w ^ int(KEYS[word])
            total += (x & 0xFFFFFFFF) * (x >> 32) + w
        blocks.append((total & MASK).to_bytes(8, "little"))
    return xxhash.xxh3_64_intdigest(b"".join(blocks) + len(data).to_bytes(8, "little"))


def addresses(array: np.ndarray, shift: int = 0) -> np.ndarray:
    """(n, T) the start of each of the (n, T, room) rows."""
    room = np.uint64(array.shape[-1])
    return (np.arange(array[..., 0].size, dtype=np.uint64) * room).reshape(array.shape[:2]) + np.uint64(
        array.ctypes.data + shift
    )


@pytest.fixture(params=["python", "native"])
def twin(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.library() is None:
        pytest.skip(native.unavailable_reason())
    return str(request.param)


@pytest.fixture
def summing(twin: str) -> Summing:
    if twin == "python":
        return lambda rows, sizes: checksum._sum_rows(None, *check_rows(rows, sizes))
    return sums


@pytest.fixture
def copying(twin: str) -> Copying:
    if twin == "python":
        return lambda *arguments: checksum._sum_rows(*check_rows(*arguments))
    return copy_and_sum


def test_the_keys_are_part_of_the_format() -> None:
    assert KEYS.shape == (512,)
    assert [hex(int(each)) for each in KEYS[[0, 1, 511]]] == [
        "0x3bf917d193cdb15a",
        "0x91e45f2cfdb17b53",
        "0xf5fb61a9f44d8770",
    ]
    assert xxhash.xxh3_64_hexdigest(KEYS.astype("<u8").tobytes()) == "5d0c7f3a272018d6"


@pytest.mark.parametrize(("size", "value"), TENSOR_VECTORS.items())
def test_published_tensor_vectors(summing: Summing, size: int, value: int) -> None:
    data = pattern(size)
    assert hex(int(summing([[data.ctypes.data]], [size])[0, 0])) == hex(value)


def test_published_root_vector(twin: str) -> None:
    row = np.array([list(TENSOR_VECTORS.values())], dtype=np.uint64)
    assert hex(int((roots if twin == "native" else checksum._hash_rows)(row)[0])) == hex(ROOT_VECTOR)


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=3 * BLOCK))
def test_the_value_is_the_definition(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    rows = [[array.ctypes.data]]
    assert int(checksum._sum_rows(None, *check_rows(rows, [len(data)]))[0, 0]) == by_the_book(data)
    assert int(sums(rows, [len(data)])[0, 0]) == by_the_book(data)


@pytest.mark.parametrize("sizes", [(1,), (4095, 4096, 4097), (65536, 65537), (200_000, 8192), (131072,)])
@pytest.mark.parametrize("shift", [0, 1, 8, 512])
def test_copy_and_sum_copies_and_sums_each_tensor(
    copying: Copying, summing: Summing, sizes: tuple[int, ...], shift: int
) -> None:
    rng = np.random.default_rng(shift)
    source = rng.integers(256, size=(5, len(sizes), max(sizes) + 512), dtype=np.uint8)
    target = np.zeros_like(source)
    src, dst = addresses(source, shift), addresses(target)
    result = copying(dst, src, sizes)
    assert (result == summing(src, sizes)).all()
    for t, size in enumerate(sizes):
        assert (target[:, t, :size] == source[:, t, shift : shift + size]).all()
        assert not target[:, t, size:].any()
        assert int(result[0, t]) == by_the_book(source[0, t, shift : shift + size].tobytes())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8193))
def test_sums_touch_no_byte_beyond_the_tensor(size: int) -> None:
    source, target = GuardedRegion(size), GuardedRegion(size)
    source.view[:] = np.arange(source.size) % 251
    src, dst = ([[region.tail(size).ctypes.data]] for region in (source, target))
    expected = by_the_book(source.tail(size).tobytes())
    assert int(checksum._sum_rows(*check_rows(dst, src, [size]))[0, 0]) == expected
    assert int(copy_and_sum(dst, src, [size])[0, 0]) == expected
    assert int(sums(dst, [size])[0, 0]) == expected
    assert not target.view[: target.size - size].any()
    source.close()
    target.close()


def test_nothing_sums_to_nothing() -> None:
    assert sums(np.empty((0, 2), np.uint64), [1, 2]).shape == (0, 2)
    assert roots(np.empty((0, 2), np.uint64)).shape == (0,)


def test_finish_makes_tensor_checksums_of_block_sums() -> None:
    data = pattern(3 * BLOCK - 5)
    block_sums = np.array([[int(KEYS[0])] * 3], dtype=np.uint64)
    assert finish(block_sums, len(data)).shape == (1,)
    assert finish(block_sums, len(data)) != finish(block_sums, len(data) + 1)


def test_roots_depend_on_every_tensor_and_their_order() -> None:
    rows = np.array([[1, 2, 3], [1, 2, 4], [2, 1, 3]], dtype=np.uint64)
    assert len(set(roots(rows).tolist())) == 3


def test_no_damage_goes_unnoticed() -> None:
    assert undetected(20_000, 20250211, host_sums) == []


def test_a_million_cases_are_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["100", "7"]) == 0
    assert "0 of 100" in capsys.readouterr().out


def test_the_damage_test_can_fail() -> None:
    assert undetected(500, 1, lambda tensors: tensors.sum(axis=1, dtype=np.uint64))


@pytest.mark.parametrize("damage", Damage)
def test_each_damage_changes_only_what_it_says(damage: Damage) -> None:
    rng = np.random.default_rng(3)
    data = rng.integers(256, size=4 * BLOCK, dtype=np.uint8)
    old = rng.integers(256, size=4 * BLOCK, dtype=np.uint8)
    seen = set()
    for _ in range(40):
        changed = data.copy()
        inflict(changed, old, damage, rng)
        seen.add(int((changed != data).sum()))
    assert len(seen) >= (1 if damage is Damage.BIT else 2)
    assert damage is not Damage.BIT or seen == {1}
