"""A digest of a checkpoint's weights that reads only a few MB and tells a fine-tune from its base.

Sizes and headers are equal for all fine-tunes of a model, so one block from the middle of every tensor goes in too.
Names, sizes and bytes count; times, owners and the place of the directory do not: a copy is equal.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

BLOCK = 4096
"""Bytes read from the middle of a tensor."""

SPREAD = 16 << 20
"""In a file whose tensors are not known, one block for this many bytes, at least MIN_BLOCKS and both ends."""

MIN_BLOCKS = 64
MAX_HEADER = 256 << 20
CONFIG_ONLY = "config-only"
"""Prefix of the fingerprint of weights that lie in no file: only the model's configuration tells them apart."""

_PATTERNS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",))
_THREADS = 16


class _TensorEntry(msgspec.Struct):
    data_offsets: tuple[int, int]


def weights_fingerprint(checkpoint: str | Path, load_format: str = "auto") -> str:
    """Hex XXH3-128 of the weight files of `checkpoint` (a directory or one file), or `config-only:REASON`.

    safetensors are preferred where both kinds lie there, as SGLang's `auto` does (model_loader/loader.py); with dummy
    weights, or without any file, there is nothing to read. An unreadable file is an OSError.
    """
    if load_format == "dummy":
        return f"{CONFIG_ONLY}:dummy"
    path = Path(checkpoint)
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        return f"{CONFIG_ONLY}:no-files"
    digest = xxhash.xxh3_128()
    with ThreadPoolExecutor(_THREADS, "tutti-fingerprint") as pool:
        for file in files:
            name = "" if path.is_file() else file.name
            digest.update(msgspec.msgpack.encode((name, *_file_digest(file, pool))))
    return digest.hexdigest()


def _weight_files(directory: Path) -> list[Path]:
    for patterns in _PATTERNS:
        files = sorted(file for pattern in patterns for file in directory.glob(pattern) if file.is_file())
        if files:
            return files
    return []


def _file_digest(file: Path, pool: ThreadPoolExecutor) -> tuple[int, bytes, bytes]:
    """(bytes of the file, digest of its header, digest of its blocks)."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        header, offsets = _tensors(descriptor, size) or (b"", _spread(size))
        return size, xxhash.xxh3_128_digest(header), _block_digest(descriptor, offsets, pool)
    finally:
        os.close(descriptor)


def _tensors(descriptor: int, size: int) -> tuple[bytes, list[int]] | None:
    """Header of a safetensors file and where each tensor's middle block starts; None when it is not one."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        return None
    header = os.pread(descriptor, length, 8)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        spans = [msgspec.json.decode(entry, type=_TensorEntry).data_offsets for entry in entries.values()]
    except (msgspec.DecodeError, RecursionError):
        return None
    start = 8 + length
    return header, sorted(start + max(low, (low + high - BLOCK) // 2) for low, high in spans if high > low)


def _spread(size: int) -> list[int]:
    blocks = max(MIN_BLOCKS, size // SPREAD)
    last = max(0, size - BLOCK)
    return sorted({last * block // (blocks - 1) for block in range(blocks)})


def _block_digest(descriptor: int, offsets: Iterable[int], pool: ThreadPoolExecutor) -> bytes:
    def read(offset: int) -> bytes:
        return xxhash.xxh3_64_digest(os.pread(descriptor, BLOCK, offset))

    return xxhash.xxh3_128_digest(b"".join(pool.map(read, offsets)))
