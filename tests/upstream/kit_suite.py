"""SGLang's unit kit for the radix tree over storage (sglang/test/kits/unified_radix_cache), on this tier.

Run by test_kits.py in a process of its own, on the CPU platform and with the plugin loaded as in a scheduler. Trees,
pools, host pools and the controller are SGLang's; where the kit names its file backend, `tutti` is put in its place.
"""

import json
import os
from array import array
from typing import Any
from unittest import mock

import sglang.srt.managers.scheduler  # noqa: F401  the plugin hooks only into processes that have it
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from tutti_sglang.integration.cpu_model import built_in_model
from tutti_sglang.integration.hicache import TuttiHiCacheStorage
from tutti_sglang.integration.live import live_backends

with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="0"):  # the kit takes a port from its first character
    from sglang.test.test_utils import CustomTestCase
from sglang.test.kits.unified_radix_cache import mixins
from sglang.test.kits.unified_radix_cache.config import CONFIGS, config_attrs, requires_hicache, requires_swa_only
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix, node_device_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

load_plugins()
current_platform.init_backend()

STORE = {"max_size": "256MiB", "segment_size": "16MiB", "min_free_space": "1MiB", "staging_size": "64MiB"}


def _on_tutti(storage_dir: str, **arguments: Any) -> ServerArgs:
    extra = json.loads(arguments.get("hicache_storage_backend_extra_config") or "{}")
    extra |= {"storage_dirs": [storage_dir], **STORE}
    mine = {
        "model_path": str(built_in_model()),  # its configuration is read for the identity
        "hicache_storage_backend": "tutti",
        "hicache_storage_backend_extra_config": json.dumps(extra),
        "hicache_io_backend": "kernel",
        "hicache_mem_layout": "page_first",
    }
    return ServerArgs(**(arguments | mine))


class Suite(UnifiedRadixCacheStorageFixtures):
    """The checks; one class for each of the kit's configurations is made below."""

    def _init_hicache(self, cache: Any, **options: Any) -> None:
        if options.get("storage_backend") != "file":
            super()._init_hicache(cache, **options)
            return
        # Given by the user, so that it stays: else whole pages are copied, and the kit's allocator hands out tokens.
        given = mock.patch.object(ServerArgs, "launch_command", "--hicache-io-backend --hicache-mem-layout")
        tutti = mock.patch.object(mixins, "ServerArgs", lambda **args: _on_tutti(options["storage_dir"], **args))
        with given, tutti:
            super()._init_hicache(cache, **options)
        assert cache.cache_controller.io_backend == "kernel"
        assert isinstance(cache.cache_controller.storage_backend, TuttiHiCacheStorage)

    def _flush_l3_backups(self, cache: Any, timeout: float = 10.0) -> None:
        super()._flush_l3_backups(cache, timeout)
        for backend in live_backends():
            backend.flushed()

    def _pools(self, allocator: Any, requests: Any) -> dict[ComponentType, list[Any]]:
        """The device tensors of each component; rows are the first dimension, or slots the second one of a state."""
        pool = allocator.get_kvcache()
        full = getattr(pool, "full_kv_pool", pool)
        tensors = {ComponentType.FULL: [*full.k_buffer, *full.v_buffer]}
        if self.cfg.has_swa:
            tensors[ComponentType.SWA] = [*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer]
        if self.cfg.has_mamba:
            state = requests.mamba_pool.mamba_cache
            layers = [layer for tensor in (*state.conv, state.temporal) for layer in tensor.unbind(0)]
            tensors[ComponentType.MAMBA] = layers
        return tensors

    def _paint(self, allocator: Any, requests: Any, seed: int) -> None:
        torch.manual_seed(seed)
        for tensors in self._pools(allocator, requests).values():
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape))

    def _contents(self, cache: Any, allocator: Any, requests: Any, seq: list[int]) -> dict[ComponentType, list[Any]]:
        """What the tree holds for the last node of the path, by component, as bytes."""
        match = match_prefix(cache, seq)
        assert match.device_prefix_len == len(seq)
        rows = {ComponentType.FULL: cache.path_device_indices(match.last_device_node)}
        for component in (ComponentType.SWA, ComponentType.MAMBA):
            if component in self.cfg.components:
                rows[component] = node_device_value(cache, match.last_device_node, component)
                assert rows[component] is not None
        tensors = self._pools(allocator, requests)
        return {
            component: [tensor[index.long()].clone() for tensor in tensors[component]]
            for component, index in rows.items()
        }

    def _assert_equal(self, got: dict[ComponentType, list[Any]], wanted: dict[ComponentType, list[Any]]) -> None:
        assert got.keys() == wanted.keys()
        for component, tensors in wanted.items():
            for mine, theirs in zip(got[component], tensors, strict=True):
                rows = min(len(mine), len(theirs))  # a window may come back as the end of a longer node
                assert rows > 0
                assert torch.equal(mine[-rows:], theirs[-rows:]), component

    def _produced(self, storage_dir: str, seq: list[int], seed: int = 5) -> dict[ComponentType, list[Any]]:
        cache, allocator, requests = build_fixture(self.cfg)
        self._init_hicache(cache, storage_backend="file", storage_dir=storage_dir, prefetch_threshold=1)
        self._insert(cache, allocator, requests, seq)
        self._paint(allocator, requests, seed)
        leaf = match_prefix(cache, seq).last_device_node
        wanted = self._contents(cache, allocator, requests, seq)
        self._backup_node(cache, leaf)
        self._write_path_to_l3(cache, leaf)
        self._flush_l3_backups(cache)
        return wanted

    def _pages(self) -> int:
        window = self.cfg.sliding_window_size or 0
        return max(4, -(-window // self.cfg.page_size) + 1)

    @requires_hicache
    def test_every_pool_comes_back_byte_for_byte(self) -> None:
        storage_dir, seq = self._make_storage_dir(), self._make_seq(1, self._pages())
        wanted = self._produced(storage_dir, seq)
        cache, allocator, requests = self._l3_consumer(storage_dir)
        self._consume_prefetch(cache, seq, CacheRequestHandle("reader", 0))
        assert match_prefix(cache, seq).host_hit_length == len(seq)
        self._paint(allocator, requests, seed=9)
        self._load_back_through_admission(cache, requests, seq)
        self._finish_pending_loads(cache)
        self._assert_equal(self._contents(cache, allocator, requests, seq), wanted)

    @requires_hicache
    def test_a_longer_prompt_finds_what_is_there_and_another_prompt_nothing(self) -> None:
        storage_dir, seq = self._make_storage_dir(), self._make_seq(1, self._pages())
        self._produced(storage_dir, seq)
        cache, _, _ = self._l3_consumer(storage_dir)
        longer = seq + self._make_seq(5000, 2)
        self._consume_prefetch(cache, longer, CacheRequestHandle("longer", 0))
        assert match_prefix(cache, longer).host_hit_length == len(seq)
        other = self._make_seq(7000, self._pages())
        self._consume_prefetch(cache, other, CacheRequestHandle("other", 0))
        assert match_prefix(cache, other).host_hit_length == 0

    @requires_hicache
    def test_a_namespace_of_the_request_keeps_prompts_apart(self) -> None:
        storage_dir, seq = self._make_storage_dir(), self._make_seq(1, self._pages())
        self._produced(storage_dir, seq)
        cache, _, _ = self._l3_consumer(storage_dir)
        for salt, found in (("tenant", 0), (None, len(seq))):
            handle = CacheRequestHandle(f"salt-{salt}", 0)
            cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", seq), None, None, cache_salt=salt)
            self._run_prefetch_to_completion(cache, handle)
            assert match_prefix(cache, seq).host_hit_length == found

    @requires_hicache
    def test_buffer_only_restores_through_staging_and_leaves_it_empty(self) -> None:
        storage_dir, seq = self._make_storage_dir(), self._buffer_swa_seq()
        _, (keys, values) = self._produce_buffer_l3(storage_dir, seq, marker=3)
        self._drained()
        cache, allocator, _ = self._build_buffer_hicache_fixture(storage_dir)
        before = self._host_avail_sizes(cache)
        self._consume_prefetch(cache, seq, CacheRequestHandle("staged", 0))
        match = match_prefix(cache, seq)
        assert match.device_prefix_len == len(seq)
        got = self._snapshot_full_kv(allocator, cache.path_device_indices(match.last_device_node))
        assert torch.equal(got[0], keys)
        assert torch.equal(got[1], values)
        assert self._host_avail_sizes(cache) == before
        cache.sanity_check()

    @requires_hicache
    def test_buffer_only_keeps_what_a_sibling_brought_meanwhile(self) -> None:
        self._assert_sibling_head_is_trimmed(self._make_storage_dir(), self._buffer_swa_seq(), window_sized=False)

    @requires_swa_only
    def test_buffer_only_fetches_a_window_for_resident_kv(self) -> None:
        storage_dir, seq = self._make_storage_dir(), self._buffer_swa_seq()
        self._produce_buffer_l3(storage_dir, seq, marker=7)
        self._drained()
        self._assert_masked_full_is_reused(storage_dir, seq, live_tail=0)

    @requires_swa_only
    def test_a_rank_without_the_window_keeps_all_from_restoring_it(self) -> None:
        storage_dir, seq = self._setup_swa_tp_prefetch()
        for drop in (True, False):
            cache, _, _ = self._l3_consumer(storage_dir)
            cache.cache_controller.tp_world_size = 2
            self._patch_tp_prefetch_sync(cache, drop_swa=drop)
            self._consume_prefetch(cache, seq, CacheRequestHandle(f"ranks-{drop}", 0))
            assert self._swa_host_on_path(cache, seq) == (not drop)

    def _produce_buffer_l3(self, *arguments: Any, **options: Any) -> Any:
        produced = super()._produce_buffer_l3(*arguments, **options)
        self._drained()
        return produced

    def _drained(self) -> None:
        for backend in live_backends():
            backend.flushed()


for _config in (config for config in CONFIGS if config.page_size in (4, 64)):  # all take four times as long
    _name = f"Test_{_config.label}"
    globals()[_name] = type(_name, (Suite, CustomTestCase), config_attrs(Suite, _config))
