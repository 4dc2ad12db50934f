"""Published test vectors: what the C++, CUDA and Triton twins of `checksum.py` must agree with."""

import numpy as np
import numpy.typing as npt

TENSOR_VECTORS: dict[int, int] = {
    1: 0xE586499EA09E01A7,
    512: 0x12CDC354CA6B36F7,
    4095: 0x92C6E4078DBD1F2A,
    4096: 0xAFEF067EC16F534C,
    4097: 0x7CBF71D84E4C84CF,
    8192: 0xF472A1AC7D688421,
    65536: 0x9EE3B97671E747A5,
    1000000: 0x971BD189C21820E2,
}
"""Bytes of `pattern(size)` → tensor checksum."""

ROOT_VECTOR = 0xAE6B6F4435FE0621
"""The root of an object whose tensor checksums are the values above, in that order."""


def pattern(size: int) -> npt.NDArray[np.uint8]:
    """(size,) byte i is the top byte of i * 2654435761 mod 2**32."""
    return ((np.arange(size, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(24)) & np.uint64(255)).astype(
        np.uint8
    )
