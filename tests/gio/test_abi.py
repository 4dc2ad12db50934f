"""numpy and the compiler agree on every structure."""

import ctypes
import errno

import pytest

from tutti_sglang.engine import batch
from tutti_sglang.gio import abi
from tutti_sglang.testing import faults


def _fields(native: ctypes.CDLL) -> dict[str, tuple[int, int]]:
    """C++ name → (offset, size)."""
    offset, size = ctypes.c_uint64(), ctypes.c_uint64()
    table: dict[str, tuple[int, int]] = {}
    while name := native.gio_field(len(table), ctypes.byref(offset), ctypes.byref(size)):
        table[name.decode()] = offset.value, size.value
    return table


def test_every_structure_is_mirrored(native: ctypes.CDLL) -> None:
    table = _fields(native)
    dtypes = {name: dtype for name, (dtype, _) in abi.SIZES.items()} | {"FaultPlan": faults.PACKED_DTYPE}
    assert {name.split(".")[0] for name in table} == set(dtypes)
    for name, (offset, size) in table.items():
        structure, _, member = name.partition(".")
        dtype = dtypes[structure]
        if not member:
            assert size == dtype.itemsize, name
            continue
        assert dtype.fields is not None
        field = dtype.fields["class" if member == "klass" else member]
        assert (offset, size) == (field[1], field[0].itemsize), name
    mirrored = {
        f"{name}.{'klass' if field == 'class' else field}" for name in abi.SIZES for field in dtypes[name].names
    }
    assert mirrored <= set(table)


def test_the_engines_and_gio_have_one_ioctx() -> None:
    assert abi.IOCTX_DTYPE == batch.IOCTX_DTYPE
    assert max(batch.Operation) + 1 == abi.FLUSH


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (abi.Local.CANCELLED, errno.ECANCELED),
        (abi.Local.NO_SLOT, errno.ETIMEDOUT),
        (abi.Local.BAD_ADDRESS, errno.EFAULT),
        (abi.Local.BAD_RANGE, errno.EBADF),
        (abi.Local.BAD_REQUEST, errno.EINVAL),
        (abi.Status.UNRECOVERED_READ, errno.EIO),
        (abi.Status.WRITE_FAULT, errno.EIO),
        (abi.Status.CAPACITY_EXCEEDED, errno.ENOSPC),
        (abi.Status.LBA_OUT_OF_RANGE, errno.EINVAL),
        (abi.Status.UNWRITTEN_BLOCK, errno.EBADF),
        (abi.Status.UNRECOVERED_READ | 0x4000, errno.EIO),  # do not retry
        (abi.Status.CAPACITY_EXCEEDED | 0x4000, errno.ENOSPC),
        (0x7FF, errno.EIO),
    ],
)
def test_a_status_has_its_errno(native: ctypes.CDLL, code: int, number: int) -> None:
    assert native.gio_errno_of(code) == number
