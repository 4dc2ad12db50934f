"""Every host pool class of the wheel: served byte by byte in each of its layouts, or refused by name."""

import ast
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

import sglang
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from tests.integration import side_pools as makers
from tests.integration.backends import Backends
from tests.integration.host_pools import mha_pool, mla_pool, slots
from tests.integration.side_pools import contents, memory, page_bytes, randomize
from tutti_sglang.errors import UnsupportedError
from tutti_sglang.integration.codecs import CODECS, REFUSED
from tutti_sglang.integration.pools import view_of

ROWS = ("layer_first", "page_first", "page_first_direct")
PAGES, OTHERS = [5, 0, 16, 3], [1, 2, 15, 4]


class Case(NamedTuple):
    """`layouts`: all that the class has; `groups`: layouts of one group share objects; `mla`: SGLang takes one rank for
    the writer."""

    make: Callable[..., Any]
    layouts: tuple[str, ...]
    groups: tuple[frozenset[str], ...]
    name: PoolName = PoolName.KV
    mla: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012


ONE = (frozenset(ROWS),)
TWO = (frozenset({"layer_first", "page_first_direct"}), frozenset({"page_first"}))
DIRECT = ("page_first", "page_first_direct")
CASES = {
    "MHATokenToKVPoolHost": Case(mha_pool, (*ROWS, "page_head"), (*TWO, frozenset({"page_head"}))),
    "AsymmetricMHATokenToKVPoolHost": Case(mha_pool, DIRECT, TWO, options={"v_width": 4}),
    "MLATokenToKVPoolHost": Case(mla_pool, ROWS, TWO, mla=True),
    "MLATokenToKVPoolHost.split": Case(makers.split_pool, ("page_first_kv_split",), (), mla=True),
    "MLATokenToKVPoolHost.split.packed": Case(
        makers.split_pool, ("page_first_kv_split",), (), mla=True, options={"packed": True}
    ),
    "MLATokenToKVPoolHost.split.plain": Case(
        makers.split_pool, ("page_first_kv_split",), (), mla=True, options={"index": False}
    ),
    "MHATokenToKVPoolMXFP8Host": Case(makers.mxfp8_pool, ("page_first",), ()),
    "MHATokenToKOnlyPoolHost": Case(makers.key_pool, ROWS, TWO, PoolName.INDEXER),
    "DSAIndexerPoolHost": Case(makers.dsa_indexer_pool, ROWS, ONE, PoolName.INDEXER, mla=True),
    "MambaPoolHost": Case(makers.mamba_pool, DIRECT, ONE, PoolName.MAMBA),
    "MambaPoolHost.side": Case(makers.mamba_pool, DIRECT, ONE, PoolName.MAMBA, options={"side": True}),
    "MambaPoolHost.conv": Case(makers.mamba_pool, DIRECT, ONE, PoolName.MAMBA, options={"temporal": 0}),
    "QSAIndexerPoolHost": Case(makers.qsa_indexer_pool, ROWS, ONE, PoolName.INDEXER),
    "DeepSeekV4PagedHostPool": Case(makers.deepseek_v4_pool, ROWS, ONE, PoolName.DEEPSEEK_V4_C4, mla=True),
    "DeepSeekV4StateHostPool": Case(makers.deepseek_v4_state_pool, ROWS, ONE, PoolName.DEEPSEEK_V4_C4_STATE, mla=True),
    "MiniMaxM3Nvfp4MainKVPoolHost": Case(makers.nvfp4_main_pool, ROWS, ONE),
    "MiniMaxM3Nvfp4IndexKPoolHost": Case(makers.nvfp4_index_pool, ROWS, ONE, PoolName.INDEXER),
}


@pytest.fixture
def backends(disk: Path) -> Iterator[Backends]:
    """One store; what is opened on it is closed at the end."""
    opened = Backends(disk / "store")
    yield opened
    opened.close()


def _open(backends: Backends, case: Case, pool: Any) -> Any:
    extra = {"segment_size": "8MiB"}  # room for a group of pages of many small tensors
    if case.name is PoolName.KV:
        return backends.open(pool, extra=extra, is_mla_model=case.mla)
    backend = backends.open(mha_pool(), extra=extra, is_mla_model=case.mla)
    backend.register_mem_host_pool_v2(pool, case.name)
    return backend


def _transfer(case: Case, pool: Any, pages: list[int], names: list[str]) -> list[PoolTransfer]:
    return [PoolTransfer(case.name, slots(pool, pages), keys=names)]


def keys(count: int) -> list[str]:
    return [hashlib.sha256(str(n).encode()).hexdigest() for n in range(count)]


WRITES = [(name, layout) for name, case in CASES.items() for layout in case.layouts]


@pytest.mark.parametrize(("name", "layout"), WRITES, ids=[f"{name}-{layout}" for name, layout in WRITES])
def test_a_page_is_read_by_the_layouts_that_share_its_bytes_and_by_no_other(
    name: str, layout: str, backends: Backends
) -> None:
    case = CASES[name]
    pool = case.make(layout, **case.options)
    assert type(pool).__name__ == name.split(".")[0]
    randomize(pool, 1)
    writer = _open(backends, case, pool)
    assert writer.batch_set_v2(_transfer(case, pool, PAGES, keys(4))) == {case.name: [True] * 4}
    writer.close()
    for other in case.layouts:
        target = case.make(other, **case.options)
        randomize(target, 2)
        before = contents(target)
        reader = _open(backends, case, target)
        shared = other == layout or any({layout, other} <= group for group in case.groups)
        got = reader.batch_get_v2(_transfer(case, target, [*OTHERS, 6], keys(5)))
        assert got == {case.name: [shared] * 4 + [False]}
        after = contents(target)
        if shared:
            assert [after[page] for page in OTHERS] == [page_bytes(pool, page) for page in PAGES]
            before = [after[page] if page in OTHERS else each for page, each in enumerate(before)]
        assert after == before, "nothing beside the pages is written"
        reader.close()


@pytest.mark.parametrize("name", CASES)
def test_a_page_map_holds_each_byte_of_the_pool_once(name: str) -> None:
    case = CASES[name]
    for layout in case.layouts:
        pool = case.make(layout, **case.options)
        view = view_of(pool)
        (page_map,) = view.maps
        sizes = np.array(page_map.sizes, np.uint64)
        starts = np.sort(page_map.rows(np.arange(view.pages)), axis=None)
        rows = page_map.rows(np.arange(view.pages))
        ends = (rows + sizes).ravel()[np.argsort(rows, axis=None)]
        assert (starts[1:] >= ends[:-1]).all(), "no two tensors overlap"
        bounds = [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in memory(pool)]
        assert all(any(a <= start and end <= b for a, b in bounds) for start, end in zip(starts, ends, strict=True))
        assert view.page_bytes == len(page_bytes(pool, 3)), "all that the pool itself takes for the page"


def _namespaces(backends: Backends, case: Case, pool: Any) -> set[str]:
    backend = _open(backends, case, pool)
    return {each.readable() for each in backend._tier._pools[case.name].namespaces}


def test_no_two_formats_have_one_namespace(backends: Backends) -> None:
    """Also where the model, the name of the pool and the sizes of the tensors are the same."""
    plain = {"name": PoolName.INDEXER, "mla": True, "layouts": (), "groups": ()}
    makes: list[Callable[[], Any]] = [
        lambda: makers.deepseek_v4_pool(item_bytes=192, whole=True),
        lambda: makers.deepseek_v4_pool(item_bytes=192, whole=False),
        makers.deepseek_v4_state_pool,
        lambda: makers.split_pool(index=False),
        lambda: makers.split_pool(index=False, packed=True),
        mla_pool,
        mha_pool,
        makers.mamba_pool,
        lambda: makers.mamba_pool(conv=((3, 40), (8, 3))),
        lambda: makers.mamba_pool(side=True),
    ]
    found = [_namespaces(backends, Case(make, **plain), make()) for make in makes]
    assert all(not one & other for one, other in itertools.combinations(found, 2))


class _Base(NamedTuple):
    name: str
    bases: tuple[str, ...]
    methods: frozenset[str]


def _classes() -> dict[str, _Base]:
    """Classes in the wheel's sources about host memory; also of platforms whose modules cannot be imported here."""
    found = {}
    for file in (Path(sglang.__path__[0]) / "srt").rglob("*.py"):
        source = file.read_bytes()
        if file.name.startswith("test_") or not re.search(rb"class \w+[(:]", source) or b"Host" not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                methods = frozenset(each.name for each in node.body if isinstance(each, ast.FunctionDef))
                bases = tuple(ast.unparse(base).split(".")[-1] for base in node.bases)
                found[node.name] = _Base(node.name, bases, methods)
    return found


def test_each_host_pool_class_of_the_wheel_is_decided() -> None:
    """A class that a new SGLang brings fails here until somebody says how its pages are kept, or why they are not."""
    classes = _classes()

    found = {name for name, each in classes.items() if {"get_data_page", "set_from_flat_data_page"} <= each.methods}
    while more := {name for name, each in classes.items() if found & set(each.bases)} - found:
        found |= more
    pools = found - {"HostKVCache"}
    wrappers = {"PageInterleaveHostPool"}  # hands every attribute on to another pool
    assert pools | wrappers == CODECS.keys() | REFUSED.keys()
    assert not CODECS.keys() & REFUSED.keys()
    assert CODECS.keys() - {"LogicalHostPool"} == {name.split(".")[0] for name in CASES}


def test_the_page_for_people_says_the_same() -> None:
    text = (Path(__file__).parents[2] / "docs" / "host-pools.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\| ([^|]*) \|", text, re.MULTILINE))
    assert rows.keys() == CODECS.keys() | REFUSED.keys()
    assert all(rows[name].startswith("refused: start ") for name in REFUSED)
    layouts: dict[str, set[str]] = {}
    for name, case in CASES.items():
        layouts.setdefault(name.split(".")[0], set()).update(case.layouts)
    assert {name: set(rows[name].split(", ")) for name in layouts} == layouts


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name_with_what_to_do(name: str, backends: Backends, disk: Path) -> None:
    pool = type(name, (), {"layout": "page_first", "page_size": 16})()
    with pytest.raises(UnsupportedError, match=rf"{name} cannot be kept in this tier: .*Start"):
        backends.open(pool)
    assert not (disk / "store").exists()


def test_a_page_is_what_its_side_pools_hold_when_the_anchor_is_logical(backends: Backends) -> None:
    """DeepSeek-V4: the anchor numbers pages and holds none."""
    anchor, compressed, state = makers.logical_pool(), makers.deepseek_v4_pool(), makers.deepseek_v4_state_pool()
    randomize(compressed, 1)
    randomize(state, 2)
    backend = backends.open(anchor, is_mla_model=True)
    backend.register_mem_host_pool_v2(compressed, PoolName.DEEPSEEK_V4_C4)
    backend.register_mem_host_pool_v2(state, PoolName.DEEPSEEK_V4_C4_STATE)
    names = keys(8)
    sides = [
        PoolTransfer(PoolName.DEEPSEEK_V4_C4, slots(compressed, list(range(6))), keys=names[:6]),
        PoolTransfer(
            PoolName.DEEPSEEK_V4_C4_STATE,
            slots(state, [3, 5]),
            keys=[names[3], names[5]],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        ),
    ]
    assert backend.batch_set_v1(names, slots(anchor, list(range(8)))) == [True] * 8
    assert backend.batch_set_v2(sides) == {"deepseek_v4_c4": [True] * 6, "deepseek_v4_c4_state": [True] * 2}
    asked = [sides[0], PoolTransfer(sides[1].name, keys=names[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    result = backend.batch_exists_v2(names, asked)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (6, [4, 6])
    assert backend.batch_exists(names) == 0, "nobody said which pools make up the page"
    assert backend.batch_exists_v2(names, []).kv_hit_pages == 0
    assert backend.batch_get_v1(names, slots(anchor, list(range(8)))) == [True] * 8


class _Elsewhere(MHATokenToKVPoolHost):
    """Of another maker, who keeps pages where only their own calls find them: here, turned."""

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return 255 - super().get_data_page(index, flat).view(torch.uint8)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return super().get_dummy_flat_data_page().view(torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        super().set_from_flat_data_page(index, (255 - data_page).view(self.dtype))


class _Heir(MHATokenToKVPoolHost):
    """Says nothing of how its pages are read: what it inherits may miss half of them."""


def _of(kind: type, layout: str = "layer_first") -> Any:
    pool = mha_pool(layout)
    pool.__class__ = kind
    return pool


def test_a_pool_of_another_maker_is_copied_by_its_own_calls(backends: Backends) -> None:
    pool, target = _of(_Elsewhere), _of(_Elsewhere)
    randomize(pool, 1)
    randomize(target, 2)
    first = backends.open(pool)
    assert first.batch_set_v1(keys(4), slots(pool, PAGES)) == [True] * 4
    first.close()
    assert backends.open(mha_pool("layer_first")).batch_exists(keys(4)) == 0
    assert backends.open(_of(_Elsewhere, "page_first")).batch_exists(keys(4)) == 0
    second = backends.open(target)
    before = contents(target)
    assert second.batch_get_v1(keys(5), slots(target, [*OTHERS, 6])) == [True] * 4 + [False]
    after = contents(target)
    assert [after[page] for page in OTHERS] == [page_bytes(pool, page) for page in PAGES]
    assert [each for page, each in enumerate(after) if page not in OTHERS] == [
        each for page, each in enumerate(before) if page not in OTHERS
    ]
    assert second.batch_set_v1([], torch.arange(0)) == []


def test_an_unknown_pool_that_inherits_its_calls_is_refused(backends: Backends) -> None:
    with pytest.raises(UnsupportedError, match="_Heir cannot be kept in this tier: it is not known"):
        backends.open(_of(_Heir))


def test_pages_whose_device_orders_bytes_otherwise_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host pool copies the device's pages as they are; their order follows an environment variable."""
    assert view_of(mha_pool()).dtype == "float16"
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert view_of(mha_pool()).dtype == "float16:hnd"


def test_context_parallel_decoding_is_refused() -> None:
    pool = mla_pool()
    pool.dcp_size = 2
    with pytest.raises(UnsupportedError, match="--dcp-size 1"):
        view_of(pool)
