"""A namespace in use: what an object of it looks like in staging and on the drives."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tutti_sglang.geometry import padded


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

    @cached_property
    def payload(self) -> int:
        """Bytes of an object without padding."""
        return sum(self.tensors)
