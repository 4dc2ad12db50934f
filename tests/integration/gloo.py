"""SGLang's radix tree, pools and cache controller on several ranks: a process for each, real gloo groups, no model.

What a scheduler does around them (compute, insert, back up, flush, prefetch, load back) is done here in the same order,
so that ranks can be made slow, failing or poor one by one.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import time
import traceback
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tutti_sglang.integration import attaching
from tutti_sglang.integration.launch import free_port

PAGE = 16
LAYERS, HEADS, WIDTH = 4, 4, 8
TOKENS = 64 * PAGE
SECONDS = 120.0

Case = Callable[["Rank"], Any]


def on_ranks(model: Path, world: int, *cases: Case, mla: bool = False, **flags: Any) -> list[list[Any]]:
    """What each case returns on each rank (by case, then rank). Cases run one after another in the same `world`
    processes; `flags`: SGLang's. AssertionError with the stack of a rank that failed, or the rank that did not end."""
    port = free_port()
    context = multiprocessing.get_context("fork")  # the imports take half a minute on a small machine
    pipes, processes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        arguments = (theirs, cases, rank, model, mla, {"port": port, "world": world}, flags)
        process = context.Process(target=_run, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    answers: list[list[Any]] = []
    try:
        for case in cases:
            deadline, row = time.monotonic() + SECONDS, []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(max(0, deadline - time.monotonic())), f"rank {rank} hangs in {case.__name__}"
                try:
                    failed, answer = pipe.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} died in {case.__name__}") from None
                assert not failed, f"rank {rank} in {case.__name__}:\n{answer}"
                row.append(answer)
            answers.append(row)
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(
    pipe: Connection,
    cases: tuple[Case, ...],
    number: int,
    model: Path,
    mla: bool,
    place: dict[str, int],
    flags: dict[str, Any],
) -> None:
    faulthandler.enable(2)  # the stack of a rank that dies of a signal belongs to its test's output
    try:
        torch.set_num_threads(1)  # OpenMP's threads did not come along with the fork
        rank = Rank(number, place, model, mla=mla, **flags)
        for case in cases:
            pipe.send((False, case(rank)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    finally:
        time.sleep(1)  # what was said is read before the connections to this rank break
        os._exit(0)


class Rank:
    """One rank. `tree`: its UnifiedRadixCache, without a storage backend until `attach`."""

    def __init__(self, number: int, place: dict[str, int], model: Path, *, mla: bool, **flags: Any) -> None:
        from sglang.srt import platforms
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        from tutti_sglang.integration import cpu_transfer, plugin
        from tutti_sglang.integration.cpu_platform import TuttiCpuPlatform

        platforms._current_platform = TuttiCpuPlatform()
        self.number, self.world, self.mla = number, place["world"], mla
        plugin.register()
        HookRegistry.apply_hooks()
        cpu_transfer.install()
        plain = {"device": "cpu", "page_size": PAGE, "enable_hierarchical_cache": True, "hicache_ratio": 2.0}
        layout = {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
        policy = {"hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "wait_complete"}
        self.arguments = ServerArgs(model_path=str(model), **(plain | layout | policy | flags))
        self.arguments.resolve_once()
        publish(self.arguments, role="scheduler", ranks=SpawnRanks(world_rank=number))
        address = f"tcp://127.0.0.1:{place['port']}"
        parallel_state.init_distributed_environment(self.world, number, address, number, backend="gloo", timeout=60)
        parallel_state.initialize_model_parallel(backend="gloo")
        initialize_dp_attention(self.arguments)
        self.parallel = get_parallel()
        self.requests = 0
        self.tree = self._tree()

    def _tree(self) -> Any:
        from sglang.srt.layers.dp_attention import get_dp_tp_group
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        parallel = self.parallel
        layers = LAYERS // parallel.pp_size
        first = parallel.pp_rank * layers
        common = {"size": TOKENS, "page_size": PAGE, "dtype": torch.float32, "device": "cpu"}
        common |= {"layer_num": layers, "enable_memory_saver": False, "start_layer": first, "end_layer": first + layers}
        if self.mla:
            self.pool: Any = MLATokenToKVPool(kv_lora_rank=24, qk_rope_head_dim=8, **common)
        else:
            heads = HEADS // parallel.attn_tp_size
            self.pool = MHATokenToKVPool(head_num=heads, head_dim=WIDTH, **common)
        self.allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.float32, "cpu", self.pool, need_sort=False)
        groups = {
            f"attn_{kind}_cache_group": getattr(parallel, f"attn_{kind}_group").cpu_group for kind in ("tp", "cp")
        }
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, TOKENS, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=get_dp_tp_group().cpu_group,
            pp_cache_group=parallel.pp_group.cpu_group,
            pp_rank=parallel.pp_rank,
            pp_size=parallel.pp_size,
            attn_cp_rank=parallel.attn_cp_rank,
            attn_cp_size=parallel.attn_cp_size,
            tree_components=(ComponentType.FULL,),
            **groups,
        )
        tree = UnifiedRadixCache(params)
        tree.init_hicache(self.arguments, params)
        return tree

    @property
    def backend(self) -> Any:
        """What the controller has attached, without SGLang's fault injector around it."""
        attached = self.tree.cache_controller.storage_backend
        return getattr(attached, "_backend", attached)

    def settings(self, store: Path | str, **extra: Any) -> str:
        """The extra config of a small store, as JSON."""
        sizes = {"max_size": "64MiB", "segment_size": "2MiB", "min_free_space": "1MiB", "staging_size": "16MiB"}
        return json.dumps({"storage_dirs": [str(store)], "prefetch_threshold": PAGE} | sizes | extra)

    def attach(self, store: Path | str, **extra: Any) -> str:
        """As SGLang's request does; the message that it answers, empty when it worked."""
        attaching._attaching.request()
        done, message = self.tree.attach_storage_backend("tutti", self.settings(store, **extra), "one-name")
        return "" if done else str(message)

    def detach(self) -> None:
        """As SGLang's request does."""
        done, message = self.tree.detach_storage_backend()
        assert done, message

    def settle(self) -> None:
        """Run SGLang's events until nothing is on its way, on all ranks alike."""
        tree, deadline = self.tree, time.monotonic() + SECONDS
        tree.flush_pending_backups()
        while True:
            tree.check_hicache_events()
            busy = [tree.ongoing_write_through, tree.ongoing_load_back, tree.ongoing_backup, tree.ongoing_prefetch]
            waits = torch.tensor([any(busy)], dtype=torch.int)
            torch.distributed.all_reduce(waits, torch.distributed.ReduceOp.MAX)
            if not waits.item():
                return
            assert time.monotonic() < deadline, busy
            time.sleep(0.01)

    def compute(self, tokens: list[int]) -> None:
        """What a forward pass leaves behind: KV in device memory, inserted and written through to the storage."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        slots = self.allocator.alloc(len(tokens))
        self.write(slots, tokens)
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots))
        self.settle()

    def _expected(self, tokens: list[int], buffer: torch.Tensor, layer: int, kind: int) -> torch.Tensor:
        """A value for each token of each buffer that tells ranks, layers and prefixes apart."""
        prefix = torch.cumsum(torch.tensor(tokens, dtype=torch.float32), 0)
        shard = 0 if self.mla else self.parallel.attn_tp_rank
        value = prefix + 1000 * (layer + LAYERS * (kind + 2 * (shard + self.world * self.parallel.attn_cp_rank)))
        return value.view(-1, 1, 1).expand(-1, *buffer.shape[1:])

    def _buffers(self) -> list[tuple[torch.Tensor, int, int]]:
        first = self.pool.start_layer
        if self.mla:
            return [(buffer, first + layer, 0) for layer, buffer in enumerate(self.pool.kv_buffer)]
        pairs = enumerate((self.pool.k_buffer, self.pool.v_buffer))
        return [(each, first + layer, kind) for kind, layers in pairs for layer, each in enumerate(layers)]

    def write(self, slots: torch.Tensor, tokens: list[int]) -> None:
        """KV of `tokens` into device memory at `slots`."""
        for buffer, layer, kind in self._buffers():
            buffer[slots] = self._expected(tokens, buffer, layer, kind)

    def flush(self) -> None:
        """Drop device and host cache, as Scheduler.flush_cache does; device memory is overwritten too."""
        self.settle()
        if self.backend is not None:  # as our hook after the flush does: other ranks see what this one accepted
            self.backend._tier.store.drain(SECONDS)
        torch.distributed.barrier()
        storage = self.tree.enable_storage
        self.tree.reset()
        self.tree.enable_storage = storage
        self.allocator.clear()
        for buffer, _, _ in self._buffers():
            buffer.fill_(-1)

    def ask(self, tokens: list[int]) -> int:
        """A request for these tokens: how many came from the storage, each of them looked at byte for byte."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tree, self.requests = self.tree, self.requests + 1
        handle = CacheRequestHandle(f"request-{self.requests}", 0)
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        held = match.device_prefix_len + match.host_hit_length
        node = match.last_host_node
        last, prefix = tree.get_last_hash_value(node), array("q", tokens[:held])
        tree.prefetch_from_storage(handle, node, array("q", tokens[held:]), last, None, prefix)
        deadline = time.monotonic() + SECONDS
        while True:
            tree.check_hicache_events()
            if tree.check_prefetch_progress(handle):
                break
            assert time.monotonic() < deadline, "the prefetch does not end"
            time.sleep(0.01)
        loaded = int(tree.pop_prefetch_loaded_tokens(handle))
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        if match.host_hit_length:
            tree.load_back(match.best_match_node, None)
            tree.ready_to_load_host_cache()
        self.settle()
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        slots = tree.path_device_indices(match.last_device_node)
        for buffer, layer, kind in self._buffers():
            wanted = self._expected(tokens[: len(slots)], buffer, layer, kind)
            assert torch.equal(buffer[slots], wanted), f"wrong KV in layer {layer}"
        return loaded


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Any:
    """`owner.name` is `value` for a while, in this process."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


def only_on(number: int, owner: Callable[[Rank], Any], name: str, value: Callable[[Any], Any]) -> Callable[..., Any]:
    """A decorator of cases: on rank `number`, `name` of what `owner` gives is replaced by `value(before)`."""

    def decorate(case: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
        def changed(rank: Rank) -> Any:
            if rank.number != number:
                return case(rank)
            it = owner(rank)
            with replaced(it, name, value(getattr(it, name))):
                return case(rank)

        return changed

    return decorate
