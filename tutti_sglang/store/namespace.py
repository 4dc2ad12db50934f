"""Namespace: everything that must be equal for two processes to exchange objects."""

import msgspec
import xxhash

from tutti_sglang.layout import Order

FORMAT = 1
"""Of an object. A reader of another format finds nothing; the old namespace stays listed and can be removed."""

Rank = tuple[int, int]
"""(rank, size)"""


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of the bytes of an object; a difference in any field is a miss (DESIGN §4.2).

    `model`: config hash, quantisation, revision, as text; `weights`: fingerprint of the checkpoint (hex), of the draft
    too where drafts are stored; `dtype`: logical dtype of the KV cache; `pool`: kind of object; `tensors`: bytes of
    each tensor of an object; `layers`: first and last + 1; `heads`: first and last + 1 of a head-split object, whose
    `tp` is then (0, 1), else None. Replicated KV (MLA) has `tp` = (0, 1) on all ranks.
    """

    model: str
    weights: str
    dtype: str
    page_size: int
    tensors: tuple[int, ...]
    layers: tuple[int, int]
    pool: str = "kv"
    order: Order = Order.LAYER
    heads: tuple[int, int] | None = None
    tp: Rank = (0, 1)
    pp: Rank = (0, 1)
    cp: Rank = (0, 1)
    dcp: Rank = (0, 1)
    speculative: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        assert self.page_size > 0
        assert self.tensors
        assert all(size > 0 for size in self.tensors)
        assert 0 <= self.layers[0] < self.layers[1]
        assert all(0 <= rank < size for rank, size in (self.tp, self.pp, self.cp, self.dcp))
        assert self.heads is None or self.tp == (0, 1)

    def digest(self) -> bytes:
        """16 bytes: XXH3-128 of the msgpack encoding. The same in every process, at every time."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(self))

    def readable(self) -> str:
        """JSON, stored beside the digest for people and for `tutti inspect`."""
        return msgspec.json.encode(self).decode()


def parse(text: str) -> Namespace:
    """The namespace that `readable` wrote. Raises msgspec.DecodeError where the text is of another format."""
    try:
        return msgspec.json.decode(text, type=Namespace)
    except RecursionError as error:
        raise msgspec.DecodeError(str(error)) from error
