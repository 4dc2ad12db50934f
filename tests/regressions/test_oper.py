"""OPER: what the operator set is what happens, and the numbers that he sees add up."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.kit import (
    MIB,
    TENSORS,
    Pages,
    Weather,
    close_good,
    get,
    keys,
    lookup,
    namespace,
    open_store,
    put,
    segment_files,
    soon,
    store_pages,
    value,
)
from tutti_sglang.config import load_config
from tutti_sglang.errors import ConfigError, UnsupportedError
from tutti_sglang.testing.faults import EVERY_BLOCK, READS, Fault, FaultPlan

STRIDE = 8192


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("~/x", "/home/somebody/x"),
        ("$HOME/x", "/home/somebody/x"),
        ("${HOME}/a b/x", "/home/somebody/a b/x"),
        ("/x/../y", "/y"),
        ("//x//y/", "/x/y"),
        ("/{rank}/x", "/3/x"),
        ("x", None),
        ("./x", None),
        ("../x", None),
        ("file:///x", None),
        ("file://x", None),
        ("~nobody-of-this-name/x", None),
        ("$UNSET_VARIABLE/x", None),
    ],
)
def test_each_spelling_of_a_path_is_that_path_or_refused(
    given: str, path: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """B84: elsewhere `~` and `file:` ended up in unexpected places."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("UNSET_VARIABLE", raising=False)
    monkeypatch.chdir(tmp_path)
    if path is None:
        with pytest.raises(ConfigError, match="path"):
            load_config({"storage_dirs": [given]}, {}, rank=3)
    else:
        config = load_config({"storage_dirs": [given]}, {}, rank=3).config
        assert config.storage_dirs == (path,)
    assert not os.listdir(tmp_path)


def test_found_and_lost_add_up_with_a_reason_for_each_page(disk: Path) -> None:
    """B85: elsewhere pages that were found and not delivered vanished from the numbers."""
    weather = Weather()
    store = open_store(disk, seam=weather, max_io=STRIDE)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(10))
    with open(segment_files(disk)[0], "r+b") as file:
        file.seek(3 * STRIDE + 7)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    record = store._parts.index.lookup(ns, keys(7)).records
    assert store._parts.index.delete(ns, keys(7), record["slot"].astype("int64")).all()
    begin = MIB + 5 * STRIDE
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=READS, begin=begin, end=begin + STRIDE)
    pages = Pages(10)
    found = store.get(ns, keys(*range(9), 99), pages.rows, soon(0.5)).tolist()
    assert found == [number not in (3, 5, 7) for number in range(9)] + [False]
    assert value(store, "tutti_hit_objects", tier="drive") == 6
    reasons = {why: value(store, "tutti_missed_objects", reason=why) for why in ("absent", "checksum", "deadline")}
    assert reasons == {"absent": 2, "checksum": 1, "deadline": 1}
    assert value(store, "tutti_hit_objects") + value(store, "tutti_missed_objects") == 10
    assert value(store, "tutti_bytes", op="read") == 6 * sum(TENSORS)
    weather.plan.gate.open()
    store.close()


def test_what_the_store_has_is_told_from_what_was_taken_of_it(disk: Path) -> None:
    """B88: elsewhere a hit that the host pool was too small for looked like a partial hit of the store."""
    store = open_store(disk)
    ns = store.attach(namespace())
    store_pages(store, ns, *range(10))
    assert lookup(store, ns, *range(12)) == [True] * 10 + [False] * 2
    assert get(store, ns, *range(3)) == [True] * 3
    assert value(store, "tutti_lookup_objects", outcome="found") == 10
    assert value(store, "tutti_lookup_objects", outcome="absent") == 2
    assert value(store, "tutti_hit_objects") == 3
    close_good(store)


def _counters(store: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    counters = store._parts.metrics._counters.values()
    samples = [sample for counter in counters for family in counter.collect() for sample in family.samples]
    return {(s.name, tuple(s.labels.values())): s.value for s in samples if s.name.endswith("_total")}


def test_no_counter_ever_goes_back(disk: Path) -> None:
    """B86: elsewhere a difference of two counters became negative, and the metrics crashed."""
    weather = Weather()
    store = open_store(disk, seam=weather, max_size=2 * MIB)
    spaces = [store.attach(namespace(model)) for model in "ab"]
    rng, last = random.Random(3), _counters(store)
    for turn in range(120):
        rate = EVERY_BLOCK // 50 if turn % 4 == 0 else 0
        weather.plan = FaultPlan({rng.choice([Fault.ERROR, Fault.TORN]): rate}, seed=turn, error=errno.EIO)
        ns, start = rng.choice(spaces), rng.randrange(200)
        numbers = range(start, start + 10)
        act = rng.choice([put, put, get, lookup, lambda store, ns, *_: store.clear(ns)])
        act(store, ns, *numbers)
        now = _counters(store)
        assert all(now[name] >= before for name, before in last.items())
        last = now
    accepted = value(store, "tutti_put_objects", outcome="accepted")
    weather.plan = None
    assert store.drain(8)
    ended = sum(value(store, "tutti_put_objects", outcome=how) for how in ("written", "dropped"))
    assert 0 < ended <= accepted, "what was cleared while it waited is neither"
    store.verify(repair=True)
    close_good(store)


def test_a_hash_that_has_to_be_compiled_is_loaded_before_the_first_request(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B87: elsewhere a server was healthy until the first prompt, and died looking for a header."""
    from tutti_sglang.integration import hashing

    def missing(*_: Any) -> Any:
        raise RuntimeError("build failed") from FileNotFoundError("openssl/sha.h")

    monkeypatch.setattr(hashing, "get_hash_str", missing)
    with pytest.raises(UnsupportedError, match=r"openssl/sha\.h.*libssl-dev"):
        opened()
