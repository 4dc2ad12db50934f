"""Linkers over real device pools on the CPU, and the calls that SGLang's tree makes for a request."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from tests.store.kit import eventually
from tutti_sglang.integration import linker as linker_module
from tutti_sglang.integration.linker import TuttiLinker

LAYERS, HEADS, WIDTH, PAGE = 4, 2, 64, 16
FULL, SWA = (ComponentType.FULL,), (ComponentType.FULL, ComponentType.SWA)
MAMBA = (ComponentType.FULL, ComponentType.MAMBA)


def keys(count: int, start: int = 0) -> list[str]:
    """Page hashes."""
    return [hashlib.sha256(str(n).encode()).hexdigest() for n in range(start, start + count)]


def mha(pages: int = 64, **changed: Any) -> Any:
    """A device pool of `pages` pages."""
    plain = {"size": pages * PAGE, "page_size": PAGE, "dtype": torch.float16, "head_num": HEADS, "head_dim": WIDTH}
    return MHATokenToKVPool(**(plain | {"layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False} | changed))


def hnd(pages: int = 64) -> Any:
    """The same with the heads of a page one after the other."""
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        return mha(pages)


def mla(pages: int = 64) -> Any:
    """A device pool of `pages` pages."""
    plain = {"size": pages * PAGE, "page_size": PAGE, "dtype": torch.float16, "kv_lora_rank": 48}
    plain |= {"qk_rope_head_dim": 16, "layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
    return MLATokenToKVPool(**plain)


def swa(pages: int = 64) -> Any:
    """Layers 0 and 2 see all, 1 and 3 a window, in a pool of half the pages."""
    return SWAKVPool(
        size=pages * PAGE,
        size_swa=pages * PAGE // 2,
        page_size=PAGE,
        dtype=torch.float16,
        head_num=HEADS,
        head_dim=WIDTH,
        swa_attention_layer_ids=[1, 3],
        full_attention_layer_ids=[0, 2],
        device="cpu",
        enable_memory_saver=False,
    )


def hybrid(pages: int = 64) -> Any:
    """Layers 1 and 3 are attention, 0 and 2 keep a state of Mamba2, of which there are 17."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=4, head_dim=16, state_size=8, conv_kernel=4
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    states = MambaPool(
        size=16,
        spec_state_size=0,
        cache_params=Mamba2CacheParams(shape=shape, dtype=dtype, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        device="cpu",
    )
    return HybridLinearKVPool(
        size=pages * PAGE,
        dtype=torch.float16,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=states,
    )


def parts_of(pool: Any) -> dict[str, Any]:
    """Pool name → the part of the pool with its pages."""
    if hasattr(pool, "mamba_pool"):
        return {"kv": pool.full_kv_pool, "mamba": pool.mamba_pool}
    return {"kv": pool.full_kv_pool, "swa": pool.swa_kv_pool} if hasattr(pool, "swa_kv_pool") else {"kv": pool}


def buffers(pool: Any) -> list[torch.Tensor]:
    """All of its memory as bytes: (pages, bytes) for each buffer, a state's layers one after the other."""
    if isinstance(pool, MambaPool):
        states = [pool.mamba_cache.temporal, *pool.mamba_cache.conv]
        return [layer.reshape(len(layer), -1).view(torch.uint8) for state in states for layer in state]
    halves = [pool.kv_buffer] if hasattr(pool, "kv_buffer") else [pool.k_buffer, pool.v_buffer]
    pages = pool.size // PAGE + 1
    return [each[: pages * PAGE].reshape(pages, -1).view(torch.uint8) for half in halves for each in half]


def fill(pool: Any, seed: int) -> None:
    """Random bytes everywhere."""
    torch.manual_seed(seed)
    for part in parts_of(pool).values():
        for buffer in buffers(part):
            buffer.random_(0, 256)


def content(part: Any, pages: list[int]) -> list[torch.Tensor]:
    """The bytes of these pages."""
    return [buffer[pages].clone() for buffer in buffers(part)]


def watcher(part: Any, pages: list[int], want: list[torch.Tensor]) -> tuple[Callable[[int], None], list[bool]]:
    """What `forward` can be given, and whether K and V of each layer were those wanted when it might be read."""
    got: list[bool] = []

    def seen(layer: int) -> None:
        now = content(part, pages)
        got.append(all((now[at] == want[at]).all() for at in (layer, layer + len(want) // 2)))

    return seen, got


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether the bytes are equal."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def slots(pages: list[int]) -> torch.Tensor:
    """Token slots of whole pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def _of(pool: str, pages: list[int]) -> torch.Tensor:
    """The slots of pages of a pool: a state has one."""
    return torch.tensor(pages) if pool == PoolName.MAMBA else slots(pages)


def make(pool: Any, store: Path, components: Any = FULL, group: Any = None, **extra: Any) -> TuttiLinker:
    """A linker as SGLang's factory makes it. `group`: of the ranks of tensor parallelism."""
    allocator = PagedTokenToKVPoolAllocator(pool.size, PAGE, torch.float16, "cpu", pool, need_sort=False)
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=PAGE
    )
    params.tp_cache_group = params.attn_tp_cache_group = group
    if hasattr(pool, "mamba_pool"):
        params.req_to_token_pool = SimpleNamespace(
            mamba_pool=pool.mamba_pool, register_layer_transfer_counter=lambda counter: vars(pool).update(told=counter)
        )
    sizes = {"max_size": "64MiB", "segment_size": "2MiB", "min_free_space": 1, "staging_size": "16MiB"}
    settings = {"storage_dirs": [str(store)], **sizes, "preload": "8MiB", **extra}
    return TuttiLinker(None, params, components=set(components), extra_config=settings, forward_stream=None)


def offload(linker: TuttiLinker, names: list[str], pages: list[int], **side: list[int]) -> bool:
    """Offer a node and wait for its result. `side`: pages of side pools, the last ones of the node."""
    transfers = [PoolTransfer(name=PoolName.KV, keys=names, device_indices=slots(pages))]
    for name, mine in side.items():
        transfers.append(PoolTransfer(name=PoolName(name), keys=names[-len(mine) :], device_indices=_of(name, mine)))
    before = linker.num_completed_offloads()
    assert linker.offload(transfers)
    assert eventually(lambda: linker.num_completed_offloads() > before)
    return linker.pop_completed_offload()


class Request:
    """A request whose prompt has these pages. `window`: pages of the side pool `side`, if there is one; `tokens`: of
    the whole prompt, 0: nobody says."""

    def __init__(
        self,
        linker: TuttiLinker,
        rid: str,
        names: list[str],
        window: int = 0,
        side: PoolName = PoolName.SWA,
        tokens: int = 0,
    ) -> None:
        self.linker, self.rid, self.names, self.window, self.side = linker, rid, names, window, side
        self.tokens = tokens

    def transfers(self, count: int, places: dict[str, list[int]] | None = None) -> list[PoolTransfer]:
        """Of the first `count` pages; with `places` into these pages of each pool."""
        made = [PoolTransfer(name=PoolName.KV, keys=self.names[:count])]
        if self.window:
            tail = self.names[max(0, count - self.window) : count]
            made.append(PoolTransfer(name=self.side, keys=tail, hit_policy=PoolHitPolicy.TRAILING_PAGES))
        for transfer in made if places else ():
            transfer.device_indices = _of(transfer.name, (places or {})[transfer.name])
        return made

    def arrive(self) -> "Request":
        """It joins the queue."""
        with self.linker.arriving(self.rid, self.tokens):
            assert self.lookup() == 0
        self.linker.arrive(self.rid, 0)
        return self

    def lookup(self) -> int:
        """Pages that can be restored now."""
        return max(self.linker.lookup(self.rid, self.transfers(len(self.names))), default=0)

    def load(self, **places: list[int]) -> bool:
        """Into these pages of each pool."""
        return self.linker.load(self.rid, self.transfers(len(places["kv"]), places))


def admitted(linker: TuttiLinker, *rids: str) -> bool:
    """Whether all of the queue may be admitted, within a while."""
    return eventually(lambda: not linker.held(list(rids)))


def move_by(monkeypatch: pytest.MonkeyPatch, mover: Callable[..., Any]) -> None:
    """Linkers that are made from now on have such a mover of a device, in whose place is the CPU."""
    monkeypatch.setattr(
        linker_module, "choose_mover", lambda pools, engine, stream: mover(pools, torch.device("cpu"), stream)
    )


def forward(linker: TuttiLinker, seen: Any = None) -> bool:
    """What a prefill batch does: start, then each layer waits for its own, then finish. `seen`: called with each layer
    when it may be read."""
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(linker.layer_done_counter.num_layers):
        linker.layer_done_counter.wait_until(layer)
        if seen:
            seen(layer)
    return linker.finish_layer_wise_loading(index)
