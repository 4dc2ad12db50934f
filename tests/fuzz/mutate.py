"""Inputs that are nearly valid: bytes changed, cut, repeated, replaced by odd values and pieces of other inputs."""

import random
from collections.abc import Iterator, Sequence

ODD = (
    b"0", b"-1", b"1e999", b"NaN", b"18446744073709551616", b"9223372036854775808", b"null", b"true", b'""', b"[]",
    b"{}", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"{{}", b"{0}", b"{rank.__class__}", b"$HOME", b"~", b"../",
    b"\\u0000", b"[" * 300, b'{"a":' * 300, b"9" * 400, b" " * 64,
)  # fmt: skip


def inputs(seeds: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Without end; the same for the same seed."""
    rng = random.Random(seed)
    pool = list(seeds)
    while True:
        data = bytearray(rng.choice(pool))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            data = _change(data, rng, pool)
        yield bytes(data)


def _change(data: bytearray, rng: random.Random, pool: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 4, 8, 32)))
    match rng.randrange(7):
        case 0:
            return data[:at] + bytes([rng.randrange(256)]) + data[end:]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:at] + data[at:end] * rng.choice((2, 3, 50)) + data[end:]
        case 3:
            return data[:at] + rng.choice(ODD) + data[end:]
        case 4:
            return data[:at]
        case 5:
            other = rng.choice(pool)
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case _:
            if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            return data
