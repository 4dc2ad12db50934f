"""Where bytes that are read by tensors come to lie, and who touches them there: the store knows addresses only.

Of memory that the CPU reaches the store itself copies and sums. Of a device's memory the caller does, in whatever way
that device has.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum, memory
from tutti_sglang.checksum import Sums
from tutti_sglang.memory import Addresses

Which = npt.NDArray[np.int64]
"""(k,) ascending positions among the rows."""


class Target(Protocol):
    """For m objects of t tensors. `rows`: (m, t) addresses that a drive writes to; `padded`: each has room for whole
    blocks of 4 KiB; `reached`: the CPU writes there too, by address. An exception fails the read it is made for."""

    rows: Addresses
    padded: bool
    reached: bool

    def copy(self, which: Which, source: Addresses, sizes: npt.NDArray[np.int64]) -> None:
        """(k, t) host memory, (t,) bytes each, to where these objects are wanted. It may be reused then."""

    def landed(self, which: Which, sizes: npt.NDArray[np.int64], *, summed: bool) -> Sums:
        """Drives have written these rows: what is left to do until they are where they are wanted. (k, t) checksums of
        the very tensors that are there then; without `summed` whatever."""


class HostRows:
    """Memory like any other: bytes are wanted where they land."""

    padded, reached = False, True

    def __init__(self, rows: Addresses) -> None:
        """(m, t) addresses."""
        self.rows = rows

    def copy(self, which: Which, source: Addresses, sizes: npt.NDArray[np.int64]) -> None:
        """As Target.copy."""
        memory.copy_rows(self.rows[which], source, sizes)

    def landed(self, which: Which, sizes: npt.NDArray[np.int64], *, summed: bool) -> Sums:
        """As Target.landed."""
        return checksum.sums(self.rows[which], sizes) if summed else np.empty((len(which), 0), np.uint64)
