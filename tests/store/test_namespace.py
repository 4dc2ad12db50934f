"""A namespace is shared by exactly those processes whose objects have equal bytes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tutti_sglang.layout import Order
from tutti_sglang.store import namespace
from tutti_sglang.store.namespace import Namespace

ROOT = Path(__file__).parents[2]
BASE = Namespace(
    model="qwen3 rope=1e6",
    weights="00ff",
    dtype="bfloat16",
    page_size=64,
    tensors=(65536,) * 8,
    layers=(0, 4),
    tp=(0, 2),
)
OTHER: dict[str, Any] = {
    "model": "qwen3 rope=5e6",
    "weights": "00fe",
    "dtype": "float8_e4m3fn",
    "page_size": 128,
    "tensors": (32768,) * 8,
    "layers": (4, 8),
    "pool": "mamba",
    "order": Order.TOKEN,
    "heads": (0, 4),
    "tp": (1, 2),
    "pp": (1, 2),
    "cp": (0, 2),
    "dcp": (1, 2),
    "speculative": "eagle",
    "format": namespace.FORMAT + 1,
}


def test_every_field_has_a_case() -> None:
    assert OTHER.keys() == set(Namespace.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_a_difference_in_any_field_is_another_namespace(field: str) -> None:
    changed = {field: OTHER[field]} | ({"tp": (0, 1)} if field == "heads" else {})
    assert msgspec.structs.replace(BASE, **changed).digest() != BASE.digest()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_shard_depends_on_rank_and_size(size: int) -> None:
    shards = {msgspec.structs.replace(BASE, tp=(rank, size)).digest() for rank in range(size)}
    assert len(shards) == size
    assert msgspec.structs.replace(BASE, tp=(0, 8)).digest() not in shards


def test_fields_do_not_run_into_one_another() -> None:
    a = msgspec.structs.replace(BASE, model="ab", weights="c")
    b = msgspec.structs.replace(BASE, model="a", weights="bc")
    assert a.digest() != b.digest()


def test_the_readable_form_is_the_same_namespace() -> None:
    text = BASE.readable()
    assert namespace.parse(text) == BASE
    assert namespace.parse(text).digest() == BASE.digest()


def test_any_name_is_a_digest_of_16_bytes() -> None:
    for model in ("x" * 4096, "../..", ".hidden", "äöü 模型", ""):
        assert len(msgspec.structs.replace(BASE, model=model).digest()) == 16


def test_the_digest_is_fixed_for_ever_and_in_every_process() -> None:
    code = "from tutti_sglang.store import namespace; import sys; print(namespace.parse(sys.argv[1]).digest().hex())"
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", code, BASE.readable()],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() == "3c931f604886a6e7961f54c75fb84936"
