"""Slots of the store as the engine's objects."""

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.plan import Objects
from tutti_sglang.geometry import Geometry
from tutti_sglang.memory import zeros
from tutti_sglang.store.slots import Slots, numbers_of, segments_of


def objects_of(geometries: dict[int, Geometry], slots: Slots, tensors: npt.NDArray[np.int64] | None = None) -> Objects:
    """(n,) slots as objects to move whole, or only their `tensors` ((t,) ascending): layer l of all pages, say.

    `geometries`: segment → map, with those of all slots; all of one namespace, and at least one.
    """
    segments = np.array(sorted(geometries), dtype=np.int64)
    maps = tuple(geometries[segment] for segment in segments.tolist())
    every = maps[0].every if tensors is None else tensors
    one = len(maps) == 1  # np.searchsorted gives the GIL away
    places = zeros(len(slots), np.int64) if one else np.searchsorted(segments, segments_of(slots))
    return Objects(segments, maps, places, numbers_of(slots), every)
