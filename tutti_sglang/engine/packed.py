"""Requests for whole objects as kernels/host/abi.hpp wants them: structures of addresses, and arrays that they keep."""

import ctypes
from typing import Any

import numpy as np

from tutti_sglang.checksum import Sums
from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, IoClass, Operation, Ticket
from tutti_sglang.engine.moving import Moved, Read
from tutti_sglang.engine.plan import Objects, tensor_addresses
from tutti_sglang.kernels import native
from tutti_sglang.memory import Addresses


class _Objects(ctypes.Structure):
    """`struct tutti_objects`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "places", "segments", "maps", "tensors")),
        ("count", ctypes.c_uint64),
        ("tensor_count", ctypes.c_uint64),
    )


class _Moved(ctypes.Structure):
    """`struct tutti_moved`."""

    _fields_ = (
        ("failed", ctypes.c_void_p),
        ("failed_count", ctypes.c_uint64),
        ("counts", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
    )


class _Read(ctypes.Structure):
    """`struct tutti_read`."""

    _fields_ = (
        ("objects", _Objects),
        *((name, ctypes.c_void_p) for name in ("rows", "sizes", "roots", "lanes", "places")),
        ("lane_count", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("deadline", ctypes.c_int64),
        ("klass", ctypes.c_uint32),
        ("straight", ctypes.c_uint32),
        ("states", ctypes.c_void_p),
        ("moved", _Moved),
        ("open", ctypes.c_void_p),
        ("open_contexts", ctypes.c_void_p),
    )


def _of(values: Any, dtype: type[np.generic]) -> tuple[Any, int]:
    """A contiguous array and its address."""
    array = np.ascontiguousarray(values, dtype)
    return array, array.ctypes.data


class PackedObjects:
    """Objects; `address` is that of the structure."""

    def __init__(self, objects: Objects) -> None:
        arrays = [
            _of(objects.numbers, np.uint64),
            _of(objects.places, np.uint32),
            _of(objects.segments, np.uint64),
            _of([geometry.packed.ctypes.data for geometry in objects.geometries], np.uint64),
            _of(objects.tensors, np.uint32),
        ]
        self._kept = objects.geometries, arrays
        self.structure = _Objects(*(address for _, address in arrays), len(objects.places), len(objects.tensors))
        self.address = ctypes.addressof(self.structure)
        self.contexts = len(objects.places) * len(objects.tensors)


class MovedRoom:
    """Where the library writes what became of up to `contexts` IOCTX of drives below `drives`."""

    def __init__(self, contexts: int, drives: int) -> None:
        self._failed = np.empty(contexts, dtype=IOCTX_DTYPE)
        self._totals = np.zeros((2, drives), dtype=np.uint64)
        counts = self._totals.ctypes.data
        self.structure = _Moved(self._failed.ctypes.data, 0, counts, counts + self._totals.strides[0])
        self.address = ctypes.addressof(self.structure)

    def moved(self, failed: int | None = None) -> Moved:
        """What was written; `failed`: how many did, where another structure counted them."""
        count = self.structure.failed_count if failed is None else failed
        return Moved(self._failed[:count].copy() if count else self._failed[:0], *self._totals)


class PackedRead:
    """A Read, of now or ahead; `address` is that of the structure; `tickets`: of pieces under way between two calls, by
    lane."""

    def __init__(self, request: Read, deadline: int) -> None:
        objects, shape = request.objects, (len(request.objects.places), len(request.objects.tensors))
        assert len(request.sizes) == shape[1]
        assert request.step > 0
        self.request = request
        self.tickets: dict[int, Ticket] = {}
        packed, lanes = PackedObjects(objects), len(request.lanes)
        self._room = MovedRoom(packed.contexts, objects.drives)
        self._states = np.empty(shape[0], dtype=np.uint8)
        self.handles = np.zeros(lanes, dtype=np.uint64)
        self.counts = np.zeros(lanes, dtype=np.uint32)
        sizes, sizes_at = _of(request.sizes, np.uint64)
        lane, lane_at = _of(request.lanes, np.uint64)
        places = np.empty(0 if request.straight else lanes * request.step * shape[1], dtype=np.uint64)
        self._kept = packed, sizes, lane, places
        self._structure = _Read(
            packed.structure,
            *(None, sizes_at, None, lane_at, places.ctypes.data),
            *(lanes, request.step, 0, deadline, request.klass, request.straight),
            *(self._states.ctypes.data, self._room.structure),
            *(self.handles.ctypes.data, self.counts.ctypes.data),
        )
        self.address = ctypes.addressof(self._structure)
        if request.rows is not None:
            self.aim(request.rows, request.roots, deadline)

    def aim(self, rows: Addresses, roots: Sums | None, deadline: int) -> None:
        """Where the objects are to be copied, and what their roots must be."""
        shape = self._states.size, len(self.request.sizes)
        assert rows.shape == shape
        assert rows.dtype == np.uint64
        rows, self._structure.rows = _of(rows, np.uint64)
        roots, self._structure.roots = (None, None) if roots is None else _of(roots, np.uint64)
        self._structure.deadline = deadline
        self._aimed = rows, roots

    @property
    def started(self) -> int:
        """Pieces that are under way or were."""
        return int(self._structure.started)

    @property
    def states(self) -> Any:
        """(n,) State."""
        return self._states

    def moved(self) -> Moved:
        """What became of the I/O."""
        return self._room.moved(self._structure.moved.failed_count)


def native_plan(objects: Objects, base: Addresses, operation: Operation, klass: IoClass) -> Batch:
    """As engine.plan.plan, by the native library."""
    library = native.library()
    assert library
    packed = PackedObjects(objects)
    batch = np.empty(packed.contexts, dtype=IOCTX_DTYPE)
    rows = tensor_addresses(base, objects.strides)
    size = objects.geometries[0].segment_size
    library.tutti_plan(packed.address, rows.ctypes.data, size, operation, klass, batch.ctypes.data)
    return batch
