"""Everything that reads bytes which somebody else may have written: on the disk, in a setting, from a server.

A parser may refuse an input only by the errors that its docstring names; anything else (a crash, a hang, another
exception) is a defect.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tests.fuzz import files
from tutti_sglang.cli.scrape import parse as parse_metrics
from tutti_sglang.config import load_config, read_extra_config
from tutti_sglang.errors import ConfigError, ForeignStoreError, StoreError
from tutti_sglang.schedule.profiling import Drives
from tutti_sglang.schedule.slack import VERSION, Cell, Saved
from tutti_sglang.store import namespace, superblock, survey
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
PROFILE = Saved(
    VERSION,
    files.IDENTITY,
    [Cell(64.0, 0.0, [0.01, 0.011], [0.012]), Cell(4096.0, 1000.0, [0.5] * 9, []), Cell(512.0, 64.0, [0.1], [0.1])],
)
METRICS = b'# TYPE tutti_bytes counter\ntutti_bytes_total{op="read",pid="1"} 3.5e9\ntutti_bytes_total{op="write"} NaN\n'


def _settings(data: bytes) -> object:
    return load_config(read_extra_config(data.decode("utf-8", "surrogateescape")), {})


def _identity(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    survey._identity(text)
    tensors = NamespaceRow(b"", text, 0).tensors
    return tensors, namespace.parse(text)


PARSERS = {
    "superblock": Parser(
        (msgspec.json.encode(BLOCK),), lambda data: superblock.parse(data, "/x"), (ForeignStoreError,)
    ),
    "identity": Parser((IDENTITY.readable().encode(),), _identity, (StoreError, msgspec.DecodeError, AssertionError)),
    "settings": Parser(SETTINGS, _settings, (ConfigError,)),
    "size": Parser((b"200GiB", b"1.5 TB", b"64k"), lambda data: parse_size(data.decode("latin-1")), (ConfigError,)),
    "weights": Parser((len(WEIGHTS).to_bytes(8, "little") + WEIGHTS + bytes(16),), files.weights, ()),
    "profile": Parser((msgspec.json.encode(PROFILE),), files.profile, ()),
    "drives": Parser(
        (msgspec.json.encode(Drives([(1 << 20, 0.001), (1 << 24, 0.01)] * 2, 2e9, 1e9, 1e9)),), files.drives, ()
    ),
    "record": Parser((files.record_seed(),), files.record, ()),
    "owner": Parser((files.OWNER,), files.owner, ()),
    "sums": Parser((bytes(range(256)) * 2,), files.sums, ()),
    "metrics": Parser((METRICS,), lambda data: parse_metrics(data.decode("utf-8", "replace")), (ValueError,)),
}
