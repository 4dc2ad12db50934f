"""The memory shared by host, mover and controller, as numpy types: the mirror of kernels/gio/*.cuh.

Sizes are asserted here and there; tests/gio/test_abi.py compares every field with what the compiler says.
"""

import enum

import numpy as np

CONTEXTS = 2048
"""IOCTX in an IOCB (paper, gio_uring)."""
PIECES = 8192
"""Sub-I/Os in an IOCB."""
JOINED = 128
"""IOCTX that one command moves at most."""
CONTEXT_BITS, JOIN_SHIFT = 11, 24
"""An IOCB's map holds `IOCTX joined - 1 << JOIN_SHIFT | piece << CONTEXT_BITS | IOCTX`."""
QUEUE_ENTRIES = 1024
"""Entries of the largest queue."""
PAGE = 4096
"""Bytes of a controller's memory page."""
PRP_WINDOW = 256
"""Entries of a PRP list that are always usable; see `queues.prp_table`."""
PRP_MDTS = PRP_WINDOW * PAGE
"""Bytes that a command moves at most by such a list, wherever in a page they start."""
FLUSH = 2
"""The operation beside engine.batch.Operation: an IOCTX of any length that makes a drive's cache durable."""

IOCTX_DTYPE = np.dtype(
    [
        ("address", "<u8"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("result", "<i4"),
        ("drive", "<u2"),
        ("operation", "u1"),
        ("class", "u1"),
        ("tag", "<u4"),
    ]
)


def _layout(size: int, **fields: tuple[int, object]) -> np.dtype[np.void]:
    """A structure of `size` bytes with fields at the given offsets."""
    offsets = [offset for offset, _ in fields.values()]
    formats = [kind for _, kind in fields.values()]
    return np.dtype({"names": list(fields), "offsets": offsets, "formats": formats, "itemsize": size})


IOCB_DTYPE = _layout(
    106496,
    serial=(0, "<u8"),
    claim_ns=(8, "<u8"),
    poll_ns=(16, "<u8"),
    count=(24, "<u4"),
    pieces=(28, "<u4"),
    cancel=(32, "<u4"),
    status=(4096, ("<u2", CONTEXTS)),
    map=(8192, ("<u4", PIECES)),
    contexts=(40960, (IOCTX_DTYPE, CONTEXTS)),
)
COMPLETION_DTYPE = _layout(16, serial=(0, "<u8"), errors=(8, "<u4"))
WORK_DTYPE = _layout(64 + 4 * CONTEXTS, finished=(0, "<u4"), errors=(4, "<u4"), done=(64, ("<u4", CONTEXTS)))
REGION_DTYPE = np.dtype([("address", "<u8"), ("size", "<u8"), ("bus", "<u8"), ("prp", "<u8")])
COMMAND_DTYPE = _layout(16, word=(0, "<u4"), iocb=(4, "<u4"), context=(8, "<u4"), joined=(12, "<u4"))
STATE_DTYPE = _layout(
    20864,
    next=(0, "<u4"),
    sq_lock=(64, "<u4"),
    tail=(68, "<u4"),
    doorbells=(72, "<u4"),
    cq_lock=(128, "<u4"),
    head=(132, "<u4"),
    stray=(136, "<u4"),
    late=(192, "<u4"),
    in_use=(256, ("<u4", QUEUE_ENTRIES // 32)),
    ready=(384, ("<u4", QUEUE_ENTRIES)),
    commands=(4480, (COMMAND_DTYPE, QUEUE_ENTRIES)),
)
PAIR_DTYPE = _layout(
    48,
    sq=(0, "<u8"),
    cq=(8, "<u8"),
    sq_doorbell=(16, "<u8"),
    cq_doorbell=(24, "<u8"),
    state=(32, "<u8"),
    log_entries=(40, "<u4"),
)
DRIVE_DTYPE = _layout(
    40,
    queues=(0, "<u8"),
    first_block=(8, "<u8"),
    blocks=(16, "<u8"),
    queue_count=(24, "<u4"),
    nsid=(28, "<u4"),
    mdts=(32, "<u4"),
    block_shift=(36, "u1"),
    sgl=(37, "u1"),
)
CONTEXT_DTYPE = _layout(
    72,
    iocbs=(0, "<u8"),
    works=(8, "<u8"),
    completions=(16, "<u8"),
    regions=(24, "<u8"),
    drives=(32, "<u8"),
    lists=(40, "<u8"),
    lists_bus=(48, "<u8"),
    depth=(56, "<u4"),
    region_count=(60, "<u4"),
    drive_count=(64, "<u4"),
)
SQE_DTYPE = _layout(
    64,
    opcode=(0, "u1"),
    flags=(1, "u1"),
    cid=(2, "<u2"),
    nsid=(4, "<u4"),
    data=(24, ("<u8", 2)),
    lba=(40, "<u8"),
    cdw12=(48, "<u4"),
)
SGL_DTYPE = _layout(16, address=(0, "<u8"), word=(8, "<u8"))
CQE_DTYPE = _layout(16, dw0=(0, "<u4"), sq=(8, "<u4"), last=(12, "<u4"))
LIMITS_DTYPE = _layout(
    56,
    blocks=(0, "<u8"),
    segment_size=(8, "<u8"),
    spin_ns=(16, "<u8"),
    idle_ns=(24, "<u8"),
    nsid=(32, "<u4"),
    mdts=(36, "<u4"),
    block_shift=(40, "<u4"),
    sgl=(44, "<u4"),
    workers=(48, "<u4"),
)
FAULTS_DTYPE = np.dtype(
    [
        ("seed", "<u8"),
        ("delay_ns", "<u8"),
        ("fail", "<u4"),
        ("status", "<u4"),
        ("drop", "<u4"),
        ("delay", "<u4"),
        ("reads", "<u4"),
        ("writes", "<u4"),
    ]
)
COUNTS_DTYPE = np.dtype([(name, "<u8") for name in ("commands", "bytes", "failed", "dropped", "delayed", "fatal")])
RELAY_DTYPE = _layout(16, word=(0, "<u8"), doorbell=(8, "<u8"))
TWIN_DTYPE = _layout(16, poll_ns=(0, "<u8"), workers=(8, "<u4"), window=(12, "<u4"))

SIZES = {
    "Ioctx": (IOCTX_DTYPE, 32),
    "Iocb": (IOCB_DTYPE, 106496),
    "Completion": (COMPLETION_DTYPE, 16),
    "IocbWork": (WORK_DTYPE, 8256),
    "MappedRegion": (REGION_DTYPE, 32),
    "Command": (COMMAND_DTYPE, 16),
    "QueueState": (STATE_DTYPE, 20864),
    "QueuePair": (PAIR_DTYPE, 48),
    "Drive": (DRIVE_DTYPE, 40),
    "Context": (CONTEXT_DTYPE, 72),
    "Sqe": (SQE_DTYPE, 64),
    "SglDescriptor": (SGL_DTYPE, 16),
    "Cqe": (CQE_DTYPE, 16),
    "ControllerLimits": (LIMITS_DTYPE, 56),
    "ControllerFaults": (FAULTS_DTYPE, 40),
    "ControllerCounts": (COUNTS_DTYPE, 48),
    "RelayLine": (RELAY_DTYPE, 16),
    "TwinOptions": (TWIN_DTYPE, 16),
}
"""C++ name → (dtype, bytes)."""
for _name, (_dtype, _size) in SIZES.items():
    assert _dtype.itemsize == _size, f"{_name} has {_dtype.itemsize} bytes, not {_size}"


class Status(enum.IntEnum):
    """NVMe status codes that this package gives or looks for: SCT in bits 10:8, SC in bits 7:0 (base specification 2.0,
    figures 93-95)."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    COMMAND_ID_CONFLICT = 0x003
    DATA_TRANSFER_ERROR = 0x004
    ABORTED_SQ_DELETION = 0x008
    INVALID_NAMESPACE = 0x00B
    INVALID_SGL_SEGMENT = 0x00D
    INVALID_SGL_COUNT = 0x00E
    SGL_LENGTH_INVALID = 0x00F
    SGL_TYPE_INVALID = 0x011
    PRP_OFFSET_INVALID = 0x013
    LBA_OUT_OF_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    WRITE_FAULT = 0x280
    UNRECOVERED_READ = 0x281
    UNWRITTEN_BLOCK = 0x287
    VENDOR_ERRNO = 0x700


class Local(enum.IntEnum):
    """Codes of the mover beside NVMe's, in an IOCB's `status`."""

    CANCELLED = 0x8001
    NO_SLOT = 0x8002
    BAD_ADDRESS = 0x8003
    BAD_RANGE = 0x8004
    BAD_REQUEST = 0x8005
