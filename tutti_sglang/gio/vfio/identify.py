"""What Identify says of a controller and of a namespace, as far as it matters here (NVM Express base specification 2.0,
figures 275 and 97 of the NVM command set). Pure: bytes in, facts out."""

import struct
from dataclasses import dataclass

from tutti_sglang.gio import abi

SIZE = 4096
"""Bytes of every Identify data structure."""


@dataclass(frozen=True)
class ControllerFacts:
    """`mdts`: bytes of one command, 0 = no limit; `sgl`: data blocks as SGLs on I/O queues; `volatile`: a write cache
    that Flush empties; `fits`: queue entries of 64 and 16 bytes."""

    serial: str
    model: str
    firmware: str
    mdts: int
    sgl: bool
    volatile: bool
    namespaces: int
    fits: bool


@dataclass(frozen=True)
class NamespaceFacts:
    """`metadata`: bytes that each block carries beside its data; `protected`: end-to-end protection information is on;
    `shared`: other controllers may have it too; `read_only`: write protected."""

    blocks: int
    block_shift: int
    metadata: int
    protected: bool
    shared: bool
    read_only: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return self.blocks << self.block_shift

    def problem(self) -> str:
        """Why a store cannot live in it; empty when it can."""
        if self.blocks == 0:
            return "it is not active"
        if not 9 <= self.block_shift <= 12:
            return f"its blocks have {1 << self.block_shift} bytes, not 512 … 4096"
        if self.metadata or self.protected:
            return "its blocks carry metadata or protection information: format it without (nvme format --lbaf)"
        if self.read_only:
            return "it is write protected"
        return ""


def controller_facts(data: bytes) -> ControllerFacts:
    """Of Identify with CNS 01h."""
    (namespaces,) = struct.unpack_from("<I", data, 516)
    (sgls,) = struct.unpack_from("<I", data, 536)
    mdts, sqes, cqes = data[77], data[512], data[513]
    return ControllerFacts(
        serial=_text(data[4:24]),
        model=_text(data[24:64]),
        firmware=_text(data[64:72]),
        mdts=abi.PAGE << mdts if mdts else 0,
        sgl=sgls & 3 in (1, 2),
        volatile=bool(data[525] & 1),
        namespaces=namespaces,
        fits=sqes & 15 <= 6 <= sqes >> 4 and cqes & 15 <= 4 <= cqes >> 4,
    )


def namespace_facts(data: bytes) -> NamespaceFacts:
    """Of Identify with CNS 00h."""
    (blocks,) = struct.unpack_from("<Q", data, 0)
    flbas = data[26]
    index = flbas & 15 | (flbas >> 5 & 3) << 4 if data[25] > 15 else flbas & 15
    metadata, shift = struct.unpack_from("<HB", data, 128 + 4 * index)
    return NamespaceFacts(
        blocks=blocks,
        block_shift=shift,
        metadata=metadata,
        protected=bool(data[29] & 7),
        shared=bool(data[30] & 1),
        read_only=bool(data[99] & 1),
    )


def active_namespaces(data: bytes) -> list[int]:
    """Of Identify with CNS 02h: up to 1024 identifiers."""
    found = struct.unpack_from(f"<{SIZE // 4}I", data)
    return [number for number in found if number]


def _text(data: bytes) -> str:
    return data.decode("ascii", errors="replace").strip(" \0")
