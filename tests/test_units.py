"""Sizes are parsed as people write them and printed as they read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.errors import ConfigError
from tutti_sglang.units import align_down, align_up, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GiB", 200 << 30),
        ("1.5 TB", 1_500_000_000_000),
        ("64k", 64 << 10),
        ("7", 7),
        (7, 7),
        ("0B", 0),
        ("2tib", 2 << 40),
        ("3MB", 3_000_000),
    ],
)
def test_sizes_with_units_are_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1XB", "-1", -1, "1 2", "1e9", "0x10", True, None])
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigError, match=r"size|negative"):
        parse_size(text)  # type: ignore[arg-type]


@given(st.integers(0, 1 << 50))
def test_printing_keeps_three_digits_of_a_size(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size * 0.06 + 1


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20))
def test_rounding_lands_on_the_nearest_multiples(size: int, alignment: int) -> None:
    up, down = align_up(size, alignment), align_down(size, alignment)
    assert up % alignment == down % alignment == 0
    assert down <= size <= up < down + 2 * alignment
