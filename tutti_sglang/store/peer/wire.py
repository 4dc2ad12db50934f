"""An object on its way between machines: its tensors, one after the other, and a trailer that says what they are.

The trailer is u64 words, little-endian: MAGIC, namespace digest (2), key (4), depth in its prefix, number of tensors,
payload bytes, root, the checksum of each tensor, XXH3-64 of all words before. Bytes that arrive are shown to nobody
before all of it fits: the namespace, the key, and the checksums of the very bytes that were copied.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from tutti_sglang import checksum, memory
from tutti_sglang.memory import Addresses
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.units import align_up

MAGIC = int.from_bytes(b"TUTTIPE1", "little")
_KEY, _DEPTH, _TENSORS, _PAYLOAD, _ROOT, _SUMS = 3, 7, 8, 9, 10, 11
"""Words."""

ALIGNMENT = 64

_Words = npt.NDArray[np.uint64]
_Flags = npt.NDArray[np.bool_]


class Wire:
    """Of one namespace."""

    def __init__(self, digest: bytes, tensors: tuple[int, ...]) -> None:
        self.prefix = digest.hex() + "-"
        self.sizes = np.array(tensors, dtype=np.int64)
        self._digest = np.frombuffer(digest, dtype="<u8")
        self._offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.uint64)

    @cached_property
    def payload(self) -> int:
        """Bytes of the tensors."""
        return int(self.sizes.sum())

    @cached_property
    def size(self) -> int:
        """Bytes of an object with its trailer."""
        return align_up(self.payload, 8) + 8 * self._words

    @cached_property
    def stride(self) -> int:
        """Bytes from one object to the next in memory."""
        return align_up(self.size, ALIGNMENT)

    @property
    def _words(self) -> int:
        return _SUMS + len(self.sizes) + 1

    def names(self, keys: bytes) -> list[str]:
        """What the fleet knows each object by."""
        text = keys.hex()
        step = 2 * KEY_SIZE
        return [self.prefix + text[at : at + step] for at in range(0, len(text), step)]

    def rows(self, base: Addresses) -> Addresses:
        """(n,) addresses of objects → (n, T) of their tensors."""
        return np.asarray(base[:, None] + self._offsets[:-1])

    def seal(self, base: Addresses, keys: bytes, depth: npt.NDArray[np.uint32]) -> None:
        """Write the trailers of objects whose tensors lie there."""
        sums = checksum.sums(self.rows(base), self.sizes)
        table = self._expected(keys)
        table[:, _DEPTH] = depth
        table[:, _ROOT] = checksum.roots(sums)
        table[:, _SUMS:-1] = sums
        table[:, -1] = checksum.roots(table[:, :-1])
        into, places = memory.windows(self._trailers(base), 8 * self._words)
        into[places] = table.astype("<u8").view(f"V{8 * self._words}").reshape(-1)

    def open(self, base: Addresses, keys: bytes, rows: Addresses) -> tuple[_Flags, npt.NDArray[np.uint32]]:
        """Copy objects that came to `base` into `rows` ((n, T) addresses): (n,) which are what they should be, and how
        deep in their prefix. Rows of the others hold anything."""
        out_of, places = memory.windows(self._trailers(base), 8 * self._words)
        table = np.ascontiguousarray(out_of[places]).view("<u8").reshape(len(base), self._words)
        said = self._expected(keys)
        said[:, _DEPTH], said[:, _ROOT:] = table[:, _DEPTH], table[:, _ROOT:]
        good = (table == said).all(axis=1) & (checksum.roots(table[:, :-1]) == table[:, -1])
        which = np.flatnonzero(good)
        if len(which):
            sums = checksum.copy_and_sum(rows[which], self.rows(base[which]), self.sizes)
            same = (sums == table[which, _SUMS:-1]).all(axis=1) & (checksum.roots(sums) == table[which, _ROOT])
            good[which] = same
        return good, table[:, _DEPTH].astype(np.uint32)

    def _trailers(self, base: Addresses) -> Addresses:
        return np.asarray(base + np.uint64(align_up(self.payload, 8)))

    def _expected(self, keys: bytes) -> _Words:
        """(n, words) what is known beforehand."""
        table = np.zeros((len(keys) // KEY_SIZE, self._words), dtype=np.uint64)
        table[:, 0], table[:, 1:_KEY] = MAGIC, self._digest
        table[:, _KEY:_DEPTH] = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_SIZE // 8)
        table[:, _TENSORS], table[:, _PAYLOAD] = len(self.sizes), self.payload
        return table
