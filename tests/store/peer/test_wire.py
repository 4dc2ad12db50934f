"""What travels says what it is, and nothing else is believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.kit import TENSORS, Pages, keys
from tutti_sglang.memory import Region
from tutti_sglang.store.peer.wire import Wire

DIGEST, OTHER = b"n" * 16, b"m" * 16


class Sealed:
    """Three objects as they travel."""

    def __init__(self, tensors: tuple[int, ...] = TENSORS) -> None:
        self.wire = Wire(DIGEST, tensors)
        self.region = Region(3 * self.wire.stride)
        self.base = np.uint64(self.region.address) + np.arange(3, dtype=np.uint64) * np.uint64(self.wire.stride)
        pages = Pages(3, tensors).fill(0, 1, 2)
        for place, row in enumerate(self.wire.rows(self.base)):
            at = 0
            for address, size in zip(row.tolist(), tensors, strict=True):
                start = address - self.region.address
                self.region.view[start : start + size] = pages.bytes[place, at : at + size]
                at += size
        self.wire.seal(self.base, keys(0, 1, 2), np.array([7, 8, 9], dtype=np.uint32))

    def open(self, wire: Wire | None = None, names: bytes = keys(0, 1, 2)) -> tuple[list[bool], Pages, list[int]]:
        """What of it is believed."""
        pages = Pages(3, tuple(self.wire.sizes.tolist())).wipe()
        good, depth = (wire or self.wire).open(self.base, names, pages.rows)
        return good.tolist(), pages, depth.tolist()


@pytest.mark.parametrize("tensors", [TENSORS, (1,), (7, 4097, 1), (1 << 16,) * 3])
def test_what_was_sealed_opens(tensors: tuple[int, ...]) -> None:
    good, pages, depth = Sealed(tensors).open()
    assert good == [True] * 3
    assert depth == [7, 8, 9]
    assert all(pages.holds(number, number) for number in range(3))


def test_another_namespace_key_or_shape_is_not_what_was_asked_for() -> None:
    sealed = Sealed()
    assert sealed.open(Wire(OTHER, TENSORS))[0] == [False] * 3
    assert sealed.open(names=keys(0, 2, 1))[0] == [True, False, False]
    assert sealed.open(Wire(DIGEST, TENSORS[::-1]))[0] == [False] * 3
    sealed.region.view[:] = 0
    assert sealed.open()[0] == [False] * 3


_sealed = Sealed()


@given(st.integers(0, _sealed.wire.size - 1), st.integers(1, 255))
def test_no_byte_of_it_can_change(at: int, flip: int) -> None:
    padding = range(_sealed.wire.payload, _sealed.wire.size - 8 * (len(TENSORS) + 12))
    _sealed.region.view[at] ^= flip
    good, _, _ = _sealed.open()
    _sealed.region.view[at] ^= flip
    assert good[0] == (at in padding)
    assert good[1:] == [True, True]


def test_names_are_of_one_namespace_and_key() -> None:
    names = Wire(DIGEST, TENSORS).names(keys(0, 1)) + Wire(OTHER, TENSORS).names(keys(0, 1))
    assert len(set(names)) == 4
    assert names[0].startswith(DIGEST.hex())
    assert Wire(DIGEST, TENSORS).names(b"") == []
