"""KEY: whatever changes the bytes of a page changes where it is looked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

from tests.integration.host_pools import fill, mha_pool, slots
from tests.store.kit import close_good, get, namespace, open_store, store_pages

Open = Callable[..., Any]


def keys(count: int) -> list[str]:
    return [get_hash_str([number], None, 1)[0] for number in range(count)]


def same(pool: Any, one: int, other: int) -> bool:
    """Whether two pages hold the same bytes; random numbers may be NaN."""
    pages = [pool.get_data_page(page * pool.page_size).view(torch.uint8) for page in (one, other)]
    return torch.equal(*pages)


def test_another_kv_dtype_of_equal_page_bytes_is_another_page(opened: Open) -> None:
    """B09: elsewhere fp8 KV was filled with bytes of bf16."""
    half = mha_pool(dtype=torch.bfloat16, page_size=16)
    small = mha_pool(dtype=torch.float8_e5m2, page_size=32)
    assert half.get_data_page(0).nbytes == small.get_data_page(0).nbytes
    fill(half, 1)
    assert all(opened(half).batch_set_v1(keys(3), slots(half, [0, 1, 2])))
    other = opened(small)
    assert other.batch_exists(keys(3)) == 0
    assert other.batch_get_v1(keys(3), slots(small, [0, 1, 2])) == [False] * 3


def test_another_tp_size_of_equal_page_bytes_is_another_page(opened: Open) -> None:
    """B15: elsewhere another number of ranks got other heads."""
    whole = mha_pool(heads=4, page_size=16)
    shard = mha_pool(heads=2, page_size=32)
    assert whole.get_data_page(0).nbytes == shard.get_data_page(0).nbytes
    assert all(opened(whole).batch_set_v1(keys(3), slots(whole, [0, 1, 2])))
    assert [opened(shard, tp_rank=rank, tp_size=2).batch_exists(keys(3)) for rank in (0, 1)] == [0, 0]


def test_adapters_and_salts_keep_prompts_apart(opened: Open) -> None:
    """B11: elsewhere two tenants with one prompt shared its pages. SGLang seeds the chain; nothing is derived here."""
    tokens = list(range(48))
    chains = [
        get_hash_str(tokens, seed, 16)
        for seed in (
            None,
            *(storage_namespace_seed(*each) for each in [("lora-a", None), ("lora-b", None), (None, "s")]),
        )
    ]
    assert len({key for chain in chains for key in chain}) == 4 * 3
    pool = mha_pool()
    backend = opened(pool)
    assert all(backend.batch_set_v1(chains[1], slots(pool, [0, 1, 2])))
    assert [backend.batch_exists(chain) for chain in chains] == [0, 3, 0, 0]


def test_objects_of_another_format_are_misses_and_stay(disk: Path) -> None:
    """B17: elsewhere two generations of an engine read each other's pages."""
    formats = [msgspec.structs.replace(namespace(), format=number) for number in (1, 2, 3)]
    store = open_store(disk)
    middle = store.attach(formats[1])
    store_pages(store, middle, *range(10))
    for other in (formats[0], formats[2]):
        assert not any(get(store, store.attach(other), *range(10)))
    assert all(get(store, middle, *range(10)))
    listed = store._parts.index.namespaces()
    assert [msgspec.json.decode(row.readable)["format"] for row in listed.values()] == [2, 1, 3]
    assert store._parts.index.usage(middle).slots > 0
    close_good(store)


NAMES = ["m" * 240, "/models/a model/x", "..", ".hidden", "../../../etc/passwd", "модель-模型", "a\nb", "x" * 4096]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))
def test_no_name_reaches_the_file_system(opened: Open, disk: Path, name: str) -> None:
    """B18: elsewhere a long model path made every file name too long."""
    pool, side = mha_pool(), mha_pool("page_first", heads=2)
    fill(pool, 1)
    fill(side, 2)
    backend = opened(pool, model_name=name)
    assert backend.batch_set_v1(keys(2), slots(pool, [0, 1])) == [True, True]
    for kind in (PoolName.SWA, PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE):
        backend.register_mem_host_pool_v2(side, kind)
        assert backend.batch_set_v2([PoolTransfer(kind, slots(side, [0, 1]), keys=keys(2))]) == {kind: [True, True]}
    backend.close()
    again = opened(pool, model_name=name)
    assert again.batch_get_v1(keys(2), slots(pool, [4, 5])) == [True, True]
    assert same(pool, 4, 0)
    assert [path.name for path in disk.iterdir()] == ["store"]
    assert all(len(path.name) < 64 and path.name.isascii() for path in disk.rglob("*"))
