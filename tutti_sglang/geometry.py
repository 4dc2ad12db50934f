"""Tensor-Stripe: where tensor `t` of slot `s` of a segment lies. Pure arithmetic on integers and numpy arrays.

A segment is cut into groups of G slots; equal tensors of a group lie side by side, so that one tensor of a run of
pages is one I/O. With C positions in the segment's cycle, tensor `t` of group `g` lies at position `(g + t) mod C`,
whole (paper §4.1, Tensor-Stripe). Over C consecutive groups each position therefore holds every tensor exactly once:
a period, of the same size everywhere, which makes offsets dense by one table of C × T entries.
"""

import enum
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tutti_sglang.units import align_down, align_up

ALIGNMENT = 4096
"""Bytes: every tensor starts and ends on a multiple, so that O_DIRECT accepts it on any drive."""

GROUP_TARGET = 256 << 10
"""Bytes that one I/O for one tensor of a whole group reaches at least."""


class Stripe(enum.StrEnum):
    """What is kept whole on one drive: a tensor (bandwidth of all drives for each page) or an object (a lost drive
    costs only its share)."""

    TENSOR = "tensor"
    OBJECT = "object"


def padded(tensors: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """(T,) bytes each tensor occupies, in staging and on a drive: its size rounded up to ALIGNMENT."""
    return np.array([align_up(size, ALIGNMENT) for size in tensors], dtype=np.int64)


def group_size(tensors: tuple[int, ...]) -> int:
    """The smallest power of two G for which G equal tensors (the largest of the object) reach GROUP_TARGET bytes."""
    largest = align_up(max(tensors), ALIGNMENT)
    return 1 << max(0, (-(-GROUP_TARGET // largest) - 1).bit_length())


@dataclass(frozen=True)
class Geometry:
    """The map (slot, tensor) → (drive, offset) of one segment.

    `tensors`: bytes of each tensor of an object; `group`: G; `cycle`: drive ordinals, one may occur more than once;
    `segment_size`: bytes that one drive gives to the segment at most.
    """

    tensors: tuple[int, ...]
    group: int
    cycle: tuple[int, ...]
    segment_size: int
    stripe: Stripe = Stripe.TENSOR

    @cached_property
    def strides(self) -> npt.NDArray[np.int64]:
        """(T,) bytes each tensor occupies on disk: its size rounded up to ALIGNMENT."""
        return padded(self.tensors)

    @cached_property
    def every(self) -> npt.NDArray[np.int64]:
        """(T,) the numbers of all tensors."""
        return np.arange(len(self.tensors))

    @cached_property
    def object_size(self) -> int:
        """Bytes one object occupies on disk, padding included."""
        return int(self.strides.sum())

    @cached_property
    def position_size(self) -> int:
        """Bytes of one position of the cycle: a drive that occurs k times in it holds k positions."""
        most = max(self.cycle.count(drive) for drive in self.cycle)
        return align_down(self.segment_size // most, ALIGNMENT)

    @cached_property
    def period_size(self) -> int:
        """Bytes that C consecutive groups take at each position."""
        return self.group * self.object_size

    @cached_property
    def _holds(self) -> npt.NDArray[np.bool_]:
        """(C positions, C groups of a period, T tensors): whether this position holds that tensor of that group."""
        cycle = len(self.cycle)
        position, group, tensor = np.ogrid[:cycle, :cycle, : len(self.tensors)]
        home = group + (tensor if self.stripe is Stripe.TENSOR else 0 * tensor)
        return np.asarray(home % cycle == position)

    @cached_property
    def _table(self) -> npt.NDArray[np.int64]:
        """(C, T) offset within a period at the tensor's own position."""
        held = np.where(self._holds, self.group * self.strides, 0)
        cycle, _, tensors = held.shape
        before = np.cumsum(held.reshape(cycle, -1), axis=1).reshape(held.shape) - held
        return np.asarray((before * self._holds).sum(axis=0).reshape(cycle, tensors))

    @cached_property
    def groups(self) -> int:
        """Groups that fit in the segment: whole periods, then as many groups as still fit at every position."""
        periods, room = divmod(self.position_size, self.period_size)
        held = np.where(self._holds, self.group * self.strides, 0).sum(axis=2)
        fitting = np.logical_and.reduce(np.cumsum(held, axis=1) <= room, axis=0)
        return periods * len(self.cycle) + int(np.count_nonzero(fitting))

    @cached_property
    def slots(self) -> int:
        """Slots of the segment; 0 when it is too small for one group."""
        return self.groups * self.group

    @cached_property
    def _bases(self) -> npt.NDArray[np.int64]:
        """(C,) where each position starts in its drive's file."""
        seen = [self.cycle[:position].count(drive) for position, drive in enumerate(self.cycle)]
        return np.array(seen, dtype=np.int64) * self.position_size

    @cached_property
    def packed(self) -> npt.NDArray[np.uint64]:
        """What `locate` needs, for kernels/host/objects.cpp: G, C, T, bytes of a period, 1 where the position depends
        on the tensor; then (C,) cycle, (C,) bases, (C, T) table and (T,) strides."""
        head = [self.group, len(self.cycle), len(self.tensors), self.period_size, self.stripe is Stripe.TENSOR]
        parts = (head, self.cycle, self._bases, self._table.ravel(), self.strides)
        return np.concatenate([np.asarray(part, dtype=np.uint64) for part in parts])

    def file_size(self, drive: int) -> int:
        """Bytes of the segment's file on `drive`; 0 when the drive is not in the cycle."""
        return self.cycle.count(drive) * self.position_size

    def locate(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
        """(n,) slots → (n, T) drive ordinals and (n, T) byte offsets in the segment's file on that drive."""
        groups, within = np.divmod(slots[:, None], self.group)
        tensors = self.every
        cycle = len(self.cycle)
        position = (groups + (tensors if self.stripe is Stripe.TENSOR else 0 * tensors)) % cycle
        offset = (
            self._bases[position]
            + groups // cycle * self.period_size
            + self._table[groups % cycle, tensors]
            + within * self.strides
        )
        return np.asarray(self.cycle, dtype=np.uint16)[position], offset
