"""Addresses as devices see them: which are free, given out from the bottom. Pure arithmetic."""

from collections.abc import Sequence

from tutti_sglang.memory import PAGE
from tutti_sglang.units import align_up

BOTTOM = 1 << 32
"""Nothing below 4 GiB: there lie the window of message-signalled interrupts and most of what firmware reserves."""

LARGE = 2 << 20
"""Regions of this size start on a multiple of it, so that the IOMMU maps them in large pages."""


class IovaSpace:
    """Ranges of bus addresses; what was given out is not given out again, since there is more than anybody needs."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        """`ranges`: first and last usable address of each."""
        self._ranges = sorted((max(first, BOTTOM), last) for first, last in ranges if last > BOTTOM)

    def take(self, size: int) -> int | None:
        """The first of `size` addresses, a multiple of 4 KiB; None when no range has room."""
        alignment = LARGE if size >= LARGE else PAGE
        for i, (first, last) in enumerate(self._ranges):
            start = align_up(first, alignment)
            if start + size - 1 <= last:
                self._ranges[i] = (start + align_up(size, PAGE), last)
                return start
        return None
