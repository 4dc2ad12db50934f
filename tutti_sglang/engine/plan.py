"""Which I/O moves whole objects, or some of their tensors, between staging and the drives. Pure arithmetic.

kernels/host/objects.cpp does the same from `Geometry.packed`, without the GIL; this is the reference.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, IoClass, Operation
from tutti_sglang.geometry import Geometry
from tutti_sglang.memory import Addresses

Places = npt.NDArray[np.int64]


class Objects(NamedTuple):
    """n objects by where they lie, all with the same tensors.

    `segments`: (k,) numbers, ascending; `geometries`: of each; `places`: (n,) which of these an object lies in;
    `numbers`: (n,) its slot there; `tensors`: (t,) those to move, ascending. In staging these follow one another.
    """

    segments: Places
    geometries: tuple[Geometry, ...]
    places: Places
    numbers: Places
    tensors: Places

    @property
    def strides(self) -> Places:
        """(t,) bytes each tensor occupies, in staging and on a drive; there must be a segment."""
        return np.asarray(self.geometries[0].strides[self.tensors])

    @property
    def cycle(self) -> list[int]:
        """Ordinals of the drives that their segments use, ascending."""
        return sorted({drive for geometry in self.geometries for drive in geometry.cycle})

    @property
    def drives(self) -> int:
        """One more than the highest ordinal."""
        return max((max(geometry.cycle) for geometry in self.geometries), default=-1) + 1

    def order(self) -> Places:
        """(n,) the objects in the order of their places on the drives: neighbours become one I/O."""
        return np.asarray(np.lexsort((self.numbers, self.places)))

    def some(self, which: Places) -> "Objects":
        """Those objects only."""
        return self._replace(places=self.places[which], numbers=self.numbers[which])


def tensor_addresses(base: Addresses, strides: Places) -> Addresses:
    """(n,) where objects start in staging, (t,) strides → (n, t): tensors of an object follow each other."""
    return base[:, None] + (np.cumsum(strides) - strides).astype(np.uint64)


def object_addresses(start: int, objects: int, object_size: int) -> Addresses:
    """(objects,) addresses of objects that lie one after the other from `start` on."""
    places = range(start, start + objects * object_size, object_size)
    return np.fromiter(places, np.uint64, objects)  # np.arange gives the GIL away


def plan(objects: Objects, base: Addresses, operation: Operation, klass: IoClass) -> Batch:
    """(n * t,) one IOCTX for each tensor of each object, by drive and offset; `tag` is the number of the object.

    `base`: (n,) where each object starts in staging.
    """
    rows = tensor_addresses(base, objects.strides) if len(base) else np.empty((0, len(objects.tensors)), np.uint64)
    return plan_rows(objects, rows, operation, klass)


def plan_rows(objects: Objects, rows: Addresses, operation: Operation, klass: IoClass) -> Batch:
    """The same for tensors that lie at (n, t) `rows`."""
    batch = np.zeros((len(objects.places), len(objects.tensors)), dtype=IOCTX_DTYPE)
    for place, (segment, geometry) in enumerate(zip(objects.segments.tolist(), objects.geometries, strict=True)):
        mine = np.flatnonzero(objects.places == place)
        drives, offsets = geometry.locate(objects.numbers[mine])
        part = np.zeros((len(mine), len(objects.tensors)), dtype=IOCTX_DTYPE)
        part["address"] = rows[mine]
        part["offset"] = offsets[:, objects.tensors].astype(np.uint64) + np.uint64(segment * geometry.segment_size)
        part["length"] = objects.strides
        part["drive"] = drives[:, objects.tensors]
        part["tag"] = mine[:, None]
        batch[mine] = part
    flat = batch.reshape(-1)
    flat["operation"], flat["class"] = operation, klass
    return np.asarray(flat[np.lexsort((flat["tag"], flat["offset"], flat["drive"]))])
