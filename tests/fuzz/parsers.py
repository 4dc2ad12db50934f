"""Everything that reads bytes which somebody else may have written: on the disk, in a setting, from a server.

A parser may refuse an input only by the errors that its docstring names; anything else (a crash, a hang, another
exception) is a defect.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tutti_sglang.cli.scrape import parse as parse_metrics
from tutti_sglang.config import load_config, read_extra_config
from tutti_sglang.errors import ConfigError, ForeignStoreError, StoreError
from tutti_sglang.store import namespace, superblock
from tutti_sglang.store.fingerprint import weights_fingerprint
from tutti_sglang.store.registry import NamespaceRow
from tutti_sglang.store.superblock import Superblock
from tutti_sglang.units import parse_size


class Parser(NamedTuple):
    """`seeds`: valid inputs to start from; `refuses`: what it may raise."""

    seeds: tuple[bytes, ...]
    parse: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]


BLOCK = Superblock(format=superblock.FORMAT, store="ab" * 16, drive=3, segment_size=256 << 20).sealed()
IDENTITY = namespace.Namespace(
    model="llama", weights="0f" * 16, dtype="bfloat16", page_size=64, tensors=(4096, 8192), layers=(0, 2), heads=(0, 8)
)
SETTINGS = (
    b'{"storage_dirs": ["/mnt/a", "/mnt/{rank}"], "max_size": "1.5TiB", "fsync": "batch", "prefetch_threshold": 64}',
    b'{"storage_dirs": "/a,/b", "low_watermark": 0.5, "high_watermark": 0.9, "queue_depth": 8, "stripe": "object"}',
)
WEIGHTS = b'{"__metadata__":{},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
METRICS = b'# TYPE tutti_bytes counter\ntutti_bytes_total{op="read",pid="1"} 3.5e9\ntutti_bytes_total{op="write"} NaN\n'


def _settings(data: bytes) -> object:
    return load_config(read_extra_config(data.decode("utf-8", "surrogateescape")), {})


def _identity(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    tensors = NamespaceRow(b"", text, 0).tensors
    return tensors, namespace.parse(text)


def _weights(data: bytes) -> object:
    path = Path(_folder.name) / f"{os.getpid()}.safetensors"
    path.write_bytes(data)
    return weights_fingerprint(path)


_folder = tempfile.TemporaryDirectory(prefix="tutti-fuzz-")

PARSERS = {
    "superblock": Parser(
        (msgspec.json.encode(BLOCK),), lambda data: superblock.parse(data, "/x"), (ForeignStoreError,)
    ),
    "identity": Parser((IDENTITY.readable().encode(),), _identity, (StoreError, msgspec.DecodeError, AssertionError)),
    "settings": Parser(SETTINGS, _settings, (ConfigError,)),
    "size": Parser((b"200GiB", b"1.5 TB", b"64k"), lambda data: parse_size(data.decode("latin-1")), (ConfigError,)),
    "weights": Parser((len(WEIGHTS).to_bytes(8, "little") + WEIGHTS + bytes(16),), _weights, ()),
    "metrics": Parser((METRICS,), lambda data: parse_metrics(data.decode("utf-8", "replace")), (ValueError,)),
}
