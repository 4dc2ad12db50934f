"""Drives, segment files and memory for tests of an engine; what is on disk is read here without the engine."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, Operation
from tutti_sglang.memory import Region

SEGMENT = 1 << 20
BLOCK = 4096
MEMORY = 8 << 20


class Rig:
    """`drives` × `segments` files of SEGMENT bytes, random and known, attached to `engine`; MEMORY bytes, zeroed."""

    def __init__(self, folder: Path, drives: int = 2, segments: int = 2, flags: int = 0) -> None:
        """`flags`: for open(2), as os.O_DIRECT."""
        self.drives, self.segments = drives, segments
        self.region = Region(MEMORY)
        self.memory = self.region.view
        rng = np.random.default_rng(drives + segments)
        self.content = rng.integers(256, size=(drives, segments * SEGMENT), dtype=np.uint8)
        self.paths = [[folder / f"{drive}-{segment}.seg" for segment in range(segments)] for drive in range(drives)]
        for drive, paths in enumerate(self.paths):
            for segment, path in enumerate(paths):
                path.write_bytes(self.content[drive, segment * SEGMENT : (segment + 1) * SEGMENT].tobytes())
        self.fds = [[os.open(path, os.O_RDWR | flags) for path in paths] for paths in self.paths]

    def attach(self, engine: Engine) -> None:
        """Make every file known."""
        for drive, fds in enumerate(self.fds):
            for segment, fd in enumerate(fds):
                engine.attach(drive, segment, fd)

    def close(self) -> None:
        """Close the files and forget the memory."""
        for fds in self.fds:
            for fd in fds:
                os.close(fd)
        self.region.close()

    def batch(
        self,
        offsets: Any,
        lengths: Any = BLOCK,
        operation: Any = Operation.READ,
        *,
        drives: Any = 0,
        places: Any = None,
    ) -> Batch:
        """IOCTX of bytes `offsets` of `drives`; each argument an array of n or one value for all. `places`: where in
        the memory each lies; by default one after the other."""
        offsets = np.asarray(offsets, dtype=np.uint64)
        batch = np.zeros(len(offsets), dtype=IOCTX_DTYPE)
        batch["offset"], batch["length"], batch["operation"], batch["drive"] = offsets, lengths, operation, drives
        if places is None:
            ends = np.cumsum(batch["length"].astype(np.uint64))
            assert not len(ends) or ends[-1] <= MEMORY
            places = ends - batch["length"]
        batch["address"] = np.asarray(places, dtype=np.uint64) + np.uint64(self.region.address)
        return batch

    def in_memory(self, batch: Batch, i: int) -> npt.NDArray[np.uint8]:
        """The memory of IOCTX `i`."""
        start = int(batch["address"][i]) - self.region.address
        return self.memory[start : start + int(batch["length"][i])]

    def expected(self, batch: Batch, i: int) -> npt.NDArray[np.uint8]:
        """The bytes that IOCTX `i` read when the files are as they were made."""
        offset = int(batch["offset"][i])
        return self.content[int(batch["drive"][i]), offset : offset + int(batch["length"][i])]

    def on_disk(self, batch: Batch, i: int) -> npt.NDArray[np.uint8]:
        """The bytes of the file where IOCTX `i` lies, as they are now."""
        segment, offset = divmod(int(batch["offset"][i]), SEGMENT)
        with self.paths[int(batch["drive"][i])][segment].open("rb") as file:
            file.seek(offset)
            return np.frombuffer(file.read(int(batch["length"][i])), dtype=np.uint8)

    def blocks(self, rng: np.random.Generator, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(drives, offsets): `count` different blocks, in random order."""
        per_drive = self.segments * SEGMENT // BLOCK
        drives, blocks = np.divmod(rng.permutation(self.drives * per_drive)[:count], per_drive)
        return drives, blocks * BLOCK
