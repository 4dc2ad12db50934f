"""Commands that a controller must refuse, with the status that the specification names; put to the software controller
(tests/gio/test_controller.py) and to QEMU's. Blocks of 512 bytes, MDTS 128 KiB, a namespace of at most 2^30 blocks."""

from typing import Any, NamedTuple

from tutti_sglang.gio.abi import Status

READ, WRITE = 2, 1
SGL = 1 << 6  # of the flags byte: PSDT


class Raw(NamedTuple):
    """`data`: offsets in mapped memory for (PRP1, PRP2), or the offset and the second half of an SGL descriptor."""

    name: str
    status: int
    fields: dict[str, Any]
    data: tuple[int, int] = (0, 0)


COMMANDS = (
    Raw("a read of one block by PRP", Status.SUCCESS, {"opcode": READ}),
    Raw("a read of one block by SGL", Status.SUCCESS, {"opcode": READ, "flags": SGL}, (0, 512)),
    Raw("an unknown opcode", Status.INVALID_OPCODE, {"opcode": 0x7E}),
    Raw("the first block past the end", Status.LBA_OUT_OF_RANGE, {"opcode": READ, "lba": 1 << 40}),
    Raw("more than MDTS", Status.INVALID_FIELD, {"opcode": READ, "flags": SGL, "cdw12": 511}, (0, 256 << 10)),
    Raw("an SGL that is too short", Status.SGL_LENGTH_INVALID, {"opcode": READ, "flags": SGL, "cdw12": 7}, (0, 2048)),
)
