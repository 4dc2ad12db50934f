"""Who may exchange pages: namespaces differ in everything that changes bytes, and in nothing else."""

import itertools
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import SpawnRanks, publish, restore_context, snapshot_context
from sglang.srt.server_args import ServerArgs

from tests.integration.host_pools import HEADS, mha_pool, mla_pool, storage
from tests.integration.side_pools import logical_pool
from tutti_sglang.integration.cpu_model import built_in_model, write_model
from tutti_sglang.integration.identity import (
    Identity,
    config_digest,
    flat_namespace,
    head_groups,
    namespaces,
    published_identity,
    stand_in_identity,
)
from tutti_sglang.integration.pools import view_of
from tutti_sglang.store.namespace import Namespace

MODEL = Identity(model="{}", weights="aa", draft_weights="dd", kv_dtype="fp8_e4m3", kv_heads=HEADS)


def _one(identity: Identity, config: HiCacheStorageConfig, pool: Any) -> Namespace:
    (namespace,) = namespaces(identity, config, view_of(pool), "kv")
    return namespace


@pytest.fixture
def _context() -> Iterator[None]:
    before = snapshot_context()
    yield
    restore_context(before)


def _published(model: Path, **changed: Any) -> Identity:
    arguments = {"device": "cpu", "enable_hierarchical_cache": True, "hicache_io_backend": "direct", **changed}
    server_args = ServerArgs(model_path=str(model), **arguments)
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    identity = published_identity()
    assert identity is not None
    return identity


@pytest.mark.usefixtures("_context")
def test_the_published_model_is_told_from_every_other(tmp_path: Path) -> None:
    model = built_in_model(tmp_path)
    first = _published(model)
    assert first.kv_heads == 2
    assert first == _published(model), "the same launch"
    assert first == _published(shutil.copytree(model, tmp_path / "copy")), "a copy elsewhere"
    assert first == _published(model, served_model_name="another", page_size=32, tp_size=1)
    write_model(tmp_path / "copy", seed=1)
    others = [
        _published(tmp_path / "copy"),
        _published(model, json_model_override_args='{"rope_theta": 10000.0}'),
        _published(model, dtype="bfloat16"),
        _published(model, revision="v2"),
        _published(model, load_format="dummy"),
        _published(model, context_length=4096),
    ]
    assert len({first, *others}) == 1 + len(others)
    assert others[0].model == first.model
    assert others[0].weights != first.weights


@pytest.mark.usefixtures("_context")
def test_the_engine_does_not_change_the_identity(tmp_path: Path) -> None:
    from sglang.srt.runtime_context import process_model_config

    first = _published(built_in_model(tmp_path))
    process_model_config().hf_config.rope_theta = 1.0  # loading a model writes into its config
    assert published_identity() == first


def test_nothing_published_is_said(caplog: pytest.LogCaptureFixture) -> None:
    before = snapshot_context()
    try:
        from sglang.srt.runtime_context import reset_context

        reset_context()
        assert published_identity() is None
    finally:
        restore_context(before)
    with caplog.at_level(logging.WARNING):
        first = stand_in_identity("model", "")
    assert "model_id" in caplog.text
    assert first != stand_in_identity("other", "")


class _Config:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self.fields


def test_a_config_counts_by_its_content_alone() -> None:
    one = _Config(a=1, b={"x": torch.float16, 1: "int"}, _name_or_path="/here", transformers_version="1")
    assert config_digest(one) == config_digest(_Config(b={1: "int", "x": torch.float16}, a=1, _name_or_path="/there"))
    assert config_digest(one) != config_digest(_Config(a=1, b={"x": torch.float32}))
    assert config_digest(_Config(a=object())) == config_digest(_Config(a=object())), "no address may count"


def test_ranks_share_what_is_replicated_and_nothing_else() -> None:
    pools = {False: mha_pool(), True: mla_pool()}
    for is_mla, tp, pp, cp in itertools.product([False, True], [0, 1], [0, 1], [0, 1]):
        first = _one(MODEL, storage(is_mla_model=is_mla, tp_size=2, pp_size=2, attn_cp_size=2), pools[is_mla])
        other = _one(
            MODEL,
            storage(is_mla_model=is_mla, tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2, attn_cp_rank=cp, attn_cp_size=2),
            pools[is_mla],
        )
        shared = not pp and not cp and (is_mla or not tp)
        assert (first.digest() == other.digest()) is shared, (is_mla, tp, pp, cp)


def test_tp_sizes_and_replicas_of_a_server() -> None:
    assert _one(MODEL, storage(), mha_pool()) != _one(MODEL, storage(tp_size=2), mha_pool())
    assert _one(MODEL, storage(is_mla_model=True), mla_pool()) == _one(
        MODEL, storage(is_mla_model=True, tp_size=4, tp_rank=3), mla_pool()
    )
    assert _one(MODEL, storage(dp_rank=1), mha_pool()) == _one(MODEL, storage(), mha_pool())


def test_layouts_share_where_the_tensors_are_the_same() -> None:
    by_layout = {
        layout: _one(msgspec.structs.replace(MODEL, kv_heads=0), storage(), mha_pool(layout))
        for layout in ("layer_first", "page_first_direct", "page_first", "page_head")
    }
    assert by_layout["layer_first"] == by_layout["page_first_direct"]
    assert len(set(by_layout.values())) == 3


def test_dtype_and_page_size_keep_apart() -> None:
    half = _one(MODEL, storage(), mha_pool(dtype=torch.bfloat16))
    assert half.tensors == _one(MODEL, storage(), mha_pool(dtype=torch.float16)).tensors
    assert half != _one(MODEL, storage(), mha_pool(dtype=torch.float16))
    eight = _one(MODEL, storage(), mha_pool(page_size=32, dtype=torch.float8_e5m2))
    assert eight.tensors == half.tensors
    assert eight != half
    assert eight.dtype == "fp8_e4m3/uint8"  # what the bytes mean, not only that they are bytes
    other = msgspec.structs.replace(MODEL, kv_dtype="fp8_e5m2")
    assert eight != _one(other, storage(), mha_pool(page_size=32, dtype=torch.float8_e5m2))


def test_head_groups_are_the_same_at_every_tp_size() -> None:
    def of(tp_rank: int, tp_size: int) -> tuple[Namespace, ...]:
        config = storage(tp_rank=tp_rank, tp_size=tp_size, tp_lcm_size=4, should_split_heads=tp_size < 4)
        pool = mha_pool("page_head", heads=HEADS // tp_size)
        return namespaces(MODEL, config, view_of(pool, head_groups(MODEL, config, pool)), "kv")

    whole = of(0, 1)
    assert [each.heads for each in whole] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert of(0, 2) + of(1, 2) == whole
    assert of(0, 4) + of(1, 4) + of(2, 4) + of(3, 4) == whole


def test_ranks_with_copies_of_a_head_share_it() -> None:
    def of(tp_rank: int) -> Namespace:
        two = msgspec.structs.replace(MODEL, kv_heads=2)
        return _one(two, storage(tp_rank=tp_rank, tp_size=4), mha_pool("page_head", heads=1))

    assert [of(rank).heads for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_heads_of_an_unknown_model_stay_with_their_rank() -> None:
    unknown = msgspec.structs.replace(MODEL, kv_heads=0)
    config, pool = storage(tp_rank=1, tp_size=2, tp_lcm_size=4, should_split_heads=True), mha_pool("page_head")
    assert head_groups(unknown, config, pool) == 1
    namespace = _one(unknown, config, pool)
    assert (namespace.heads, namespace.tp) == (None, (1, 2))
    assert head_groups(MODEL, storage(tp_lcm_size=4, should_split_heads=True), mha_pool("page_first")) == 1


def test_drafts_count_only_where_they_are_stored() -> None:
    view = view_of(mha_pool())
    (plain,) = namespaces(MODEL, storage(), view, "kv")
    (draft,) = namespaces(MODEL, storage(), view, "draft")
    assert plain.weights == "aa"
    assert draft.weights == "aa+dd"


def test_flat_objects_are_apart_from_pages_and_by_size_and_dtype() -> None:
    view = view_of(mha_pool())
    (pages,) = namespaces(MODEL, storage(), view, "kv")
    flat = flat_namespace(MODEL, storage(), view, view.page_bytes, "float16")
    assert len({pages, flat, flat_namespace(MODEL, storage(), view, view.page_bytes, "bfloat16")}) == 3
    assert flat != flat_namespace(MODEL, storage(tp_size=2), view, view.page_bytes, "float16")
    assert flat_namespace(MODEL, storage(), None, 8, "uint8").tensors == (8,)


def test_flat_pages_are_told_apart_like_rows() -> None:
    """A tensor of bytes is of some KV dtype; rows may have a format, and layers of a draft."""
    plain = view_of(mha_pool())
    views = [plain, replace(plain, dtype="float16:hnd"), replace(plain, packs_draft=True)]
    others = [
        MODEL,
        msgspec.structs.replace(MODEL, kv_dtype="fp8_e5m2"),
        msgspec.structs.replace(MODEL, draft_weights=""),
    ]
    flat = {flat_namespace(model, storage(), view, 64, "uint8") for model in others[:2] for view in views}
    assert len(flat) == 6
    assert flat_namespace(MODEL, storage(), views[2], 64, "uint8") not in {
        flat_namespace(others[2], storage(), view, 64, "uint8") for view in views
    }
    assert flat_namespace(MODEL, storage(), view_of(logical_pool()), 64, "uint8").page_size == 64


def test_only_the_heads_of_the_kv_pool_are_numbered() -> None:
    """A sliding window may have more heads than the model says: one number would stand for two of them."""
    config = storage(tp_size=2 * HEADS, tp_rank=1)
    view = view_of(mha_pool("page_head", heads=1))
    (kv,), (swa,) = (namespaces(MODEL, config, view, pool) for pool in ("kv", "swa"))
    assert (kv.heads, kv.tp) == ((0, 1), (0, 1))
    assert (swa.heads, swa.tp) == (None, (1, 2 * HEADS))


@pytest.mark.parametrize("name", ["m" * 240, "a/b c/../ä", ".hidden", "..", "x\x00y"])
def test_any_served_name_is_a_namespace(name: str) -> None:
    namespace = _one(stand_in_identity(name, ""), storage(), mha_pool())
    assert len(namespace.digest()) == 16
    assert namespace != _one(stand_in_identity(name + "x", ""), storage(), mha_pool())
