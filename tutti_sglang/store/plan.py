"""Which I/O moves a batch of objects between staging and the drives. Pure arithmetic on numpy arrays."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, IoClass, Operation
from tutti_sglang.memory import Addresses
from tutti_sglang.store.slots import Slots, numbers_of, segments_of


class Places(Protocol):
    """Where the tensors of a segment's objects lie: a Geometry, or some tensors of one."""

    @property
    def segment_size(self) -> int:
        """Bytes that one drive gives to the segment at most."""

    @property
    def strides(self) -> npt.NDArray[np.int64]:
        """(T,) bytes that each tensor occupies."""

    def locate(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
        """(n,) slots → (n, T) drive ordinals and offsets in the segment's files."""


class Plan(NamedTuple):
    """`batch`: (m,) IOCTX sorted by (drive, offset); `owner`: (m,) which object of the request each belongs to."""

    batch: Batch
    owner: npt.NDArray[np.int64]


def tensor_addresses(base: Addresses, strides: npt.NDArray[np.int64]) -> Addresses:
    """(n,) where objects start in staging, (T,) strides → (n, T): tensors of an object follow each other."""
    return base[:, None] + (np.cumsum(strides) - strides).astype(np.uint64)


def object_addresses(start: int, objects: int, object_size: int) -> Addresses:
    """(objects,) addresses of objects that lie one after the other from `start` on."""
    return np.uint64(start) + np.arange(objects, dtype=np.uint64) * np.uint64(object_size)


def plan(
    geometries: Mapping[int, Places],
    slots: Slots,
    base: Addresses,
    operation: Operation,
    klass: IoClass,
    pieces: npt.NDArray[np.int64] | None = None,
) -> Plan:
    """One IOCTX for each tensor of each object.

    `slots`: (n,) slot ids; `geometries`: of each segment they lie in; `base`: (n,) where each object starts in staging;
    `pieces`: (n,) the number of the piece that each object is moved with, which then comes before drive and offset.
    """
    segments = segments_of(slots)
    parts = [
        _of_segment(geometries[segment], segment, np.flatnonzero(segments == segment), slots, base)
        for segment in np.unique(segments).tolist()
    ]
    if not parts:
        return Plan(np.empty(0, dtype=IOCTX_DTYPE), np.empty(0, dtype=np.int64))
    batch = np.concatenate([part.batch for part in parts])
    owner = np.concatenate([part.owner for part in parts])
    batch["operation"], batch["class"] = operation, klass
    keys = (batch["offset"], batch["drive"]) if pieces is None else (batch["offset"], batch["drive"], pieces[owner])
    order = np.lexsort(keys)
    return Plan(batch[order], owner[order])


def _of_segment(geometry: Places, segment: int, chosen: npt.NDArray[np.int64], slots: Slots, base: Addresses) -> Plan:
    drives, offsets = geometry.locate(numbers_of(slots[chosen]))
    batch = np.zeros(drives.shape, dtype=IOCTX_DTYPE)
    batch["address"] = tensor_addresses(base[chosen], geometry.strides)
    batch["offset"] = offsets.astype(np.uint64) + np.uint64(segment * geometry.segment_size)
    batch["length"] = geometry.strides
    batch["drive"] = drives
    return Plan(batch.reshape(-1), np.repeat(chosen, drives.shape[1]))
