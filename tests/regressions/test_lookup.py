"""LOOKUP: what is claimed is there, and an answer says which pages came, no more and no fewer."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

import torch

from tests.integration.host_pools import fill, mha_pool, slots
from tests.regressions.test_key import keys, same
from tests.store.kit import MIB, close_good, get, lookup, namespace, open_store, store_pages
from tutti_sglang.store import pins

Open = Callable[..., Any]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_a_page_counts_once_and_only_with_all_of_its_parts(opened: Open, disk: Path, layout: str) -> None:
    """B21: elsewhere K and V of a page were two results, and what followed was shifted."""
    pool = mha_pool(layout, page_size=64)
    fill(pool, 1)
    backend = opened(pool)
    assert backend.batch_set_v1(keys(5), slots(pool, [0, 1, 2, 3, 4])) == [True] * 5
    backend.close()
    _spoil(disk, pool.v_buffer, pool, page=2)
    again = opened(pool)
    assert again.batch_get_v1(keys(5), slots(pool, [5, 6, 7, 8, 9])) == [True, True, False, True, True]
    assert [same(pool, 5 + n, n) for n in (0, 1, 3, 4)] == [True] * 4
    assert again.batch_exists(keys(5)) == 2


def _spoil(disk: Path, values: torch.Tensor, pool: Any, page: int) -> None:
    """Flip a bit of V of a page where it lies on the drive."""
    flat = {
        "layer_first": lambda: values[0, page * 64 : page * 64 + 64],
        "page_first": lambda: values[page * 64 : page * 64 + 64],
        "page_first_direct": lambda: values[page, 0],
        "page_head": lambda: values[page],
    }[pool.layout]()
    needle = flat.contiguous().view(torch.uint8).numpy().tobytes()[:512]
    for file in (disk / "store" / "segments").glob("*.seg"):
        place = file.read_bytes().find(needle)
        if place >= 0:
            with open(file, "r+b") as handle:
                handle.seek(place + 99)
                handle.write(bytes([needle[99] ^ 16]))
            return
    pytest.fail("V of the page is not on the drive")


def test_what_a_lookup_claimed_outlasts_the_evictions_that_follow(disk: Path) -> None:
    """B25: elsewhere a promise from a lookup could not be kept, and the transfer failed with it."""
    store = open_store(disk, max_size=2 * MIB)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(40))
    for start in range(100, 400, 20):
        assert all(lookup(store, ns, *range(10, 30)))
        store_pages(store, ns, *range(start, start + 20))
    assert not all(get(store, ns, *range(30, 40))), "nothing was evicted"
    assert all(get(store, ns, *range(10, 30)))
    close_good(store)


def test_claims_of_all_there_is_do_not_stop_puts(disk: Path) -> None:
    """B25: a claim is kept for a while and not at any price; of what is written, some may make way for the claimed."""
    store = open_store(disk, max_size=2 * MIB)
    ns = store.attach(namespace())
    for start in range(0, 400, 20):
        store_pages(store, ns, *range(start, start + 20))
        lookup(store, ns, *range(400))
        assert sum(get(store, ns, *range(start, start + 20))) > 10
    close_good(store)


def test_pages_that_were_evicted_after_the_lookup_are_told_page_by_page(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B25: after that time, and when another process evicts, the get says which pages came, whatever was promised."""
    monkeypatch.setattr(pins, "PIN_SECONDS", 0.0)
    store = open_store(disk, max_size=2 * MIB)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(40))
    assert all(lookup(store, ns, *range(40)))
    for start in range(100, 400, 20):
        store_pages(store, ns, *range(start, start + 20))
    found = get(store, ns, *range(40))
    assert not all(found), "nothing was evicted"
    assert found == lookup(store, ns, *range(40))
    close_good(store)


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_what_is_read_back_comes_from_the_drive(disk: Path, direct_io: str) -> None:
    """B26: elsewhere everything was written and nothing could be read back, which memory had hidden."""
    store = open_store(disk, direct_io=direct_io)
    store_pages(store, store.attach(namespace()), *range(40))
    close_good(store)
    for file in disk.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    store = open_store(disk, direct_io=direct_io)
    assert all(get(store, store.attach(namespace()), *range(40)))
    close_good(store)
