"""What this process and its worker tell each other: messages of msgpack behind their length, over a socket."""

import struct
from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

Operation = Literal["exists", "get", "put", "remove", "health"]

OPENED = 0
"""The number of the reply with which a worker begins."""


class Request(msgspec.Struct, array_like=True):
    """`names`: of objects, or one prefix; `offsets`: where each lies in the shared memory; `size`: bytes of each."""

    number: int
    operation: Operation
    names: list[str]
    offsets: list[int]
    size: int


class Reply(msgspec.Struct, array_like=True):
    """`states`: base.State of each object, a count for `remove`; `error`: why the whole call failed."""

    number: int
    states: list[int]
    error: str = ""


_LENGTH = struct.Struct("<I")
T = TypeVar("T")


def pack(message: object) -> bytes:
    """For the socket."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Whole messages out of the pieces that a socket delivers."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes, kind: type[T]) -> Iterator[T]:
        """The messages that are complete now. msgspec.DecodeError."""
        self._rest += data
        while len(self._rest) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                return
            body = bytes(self._rest[_LENGTH.size : end])
            del self._rest[:end]
            yield msgspec.msgpack.decode(body, type=kind)
