"""A namespace in use: what an object of it looks like in staging and on the drives."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tutti_sglang.geometry import group_size, padded
from tutti_sglang.memory import Addresses

_PLACES_MAX = 64


@dataclass(frozen=True)
class Space:
    """`id`: the namespace's number in the index; `tensors`: bytes of each tensor of an object."""

    id: int
    tensors: tuple[int, ...]

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """(T,) bytes of each tensor."""
        return np.array(self.tensors, dtype=np.int64)

    @cached_property
    def strides(self) -> npt.NDArray[np.int64]:
        """(T,) bytes each tensor occupies in staging and on a drive."""
        return padded(self.tensors)

    @cached_property
    def object_size(self) -> int:
        """Bytes an object occupies there."""
        return int(self.strides.sum())

    def places(self, objects: int) -> Addresses:
        """(objects, T) where their tensors lie in memory for them, from its start on: as on a drive, equal tensors of a
        group side by side, so that neighbours there are one piece of memory."""
        known = self._places.get(objects)
        if known is None:
            if len(self._places) >= _PLACES_MAX:
                self._places.clear()
            known = self._places[objects] = _places(objects, group_size(self.tensors), self.strides)
        return known

    @cached_property
    def _places(self) -> dict[int, Addresses]:
        return {}

    @cached_property
    def payload(self) -> int:
        """Bytes of an object without padding."""
        return sum(self.tensors)


def _places(objects: int, group: int, strides: npt.NDArray[np.int64]) -> Addresses:
    number = np.arange(objects)
    first = number // group * group
    together = np.minimum(group, objects - first)
    before = np.cumsum(strides) - strides
    places = first[:, None] * strides.sum() + together[:, None] * before + (number - first)[:, None] * strides
    return np.asarray(places.astype(np.uint64))
