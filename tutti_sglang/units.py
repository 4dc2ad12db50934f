"""Sizes in bytes: parsing, printing, rounding."""

import re

from tutti_sglang.errors import ConfigError

_FACTORS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}
SIZE_MAX = 1 << 63
"""Above what a file offset can say."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: int | str) -> int:
    """Bytes of `200GiB`, `1.5 TB`, `64k` (binary without `B`) or a plain number. Raises ConfigError."""
    size: float
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(str(value))
        if not match or match[2].lower() not in _FACTORS:
            raise ConfigError(
                f"{value!r} is not a size", "Write bytes or a number with a unit, as in 200GiB, 1.5TB or 64MiB"
            )
        size = float(match[1]) * _FACTORS[match[2].lower()]
    if not 0 <= size < SIZE_MAX:
        raise ConfigError(f"{value!r} is negative" if size < 0 else f"{str(value)[:40]} is more than any disk holds")
    return int(size)


def format_size(size: float) -> str:
    """`1536` → `1.5KiB`; exact where it can be, else one decimal."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f}".removesuffix(".0") + unit


def align_up(size: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `size`."""
    return -(-size // alignment) * alignment


def align_down(size: int, alignment: int) -> int:
    """The largest multiple of `alignment` that is not above `size`."""
    return size // alignment * alignment
