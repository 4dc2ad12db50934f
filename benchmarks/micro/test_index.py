"""The index: a batch of 128 keys among 100,000."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.geometry import Stripe
from tutti_sglang.metrics import Metrics
from tutti_sglang.store.index import RECORD_DTYPE, Index
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.slots import NO_SLOT, slots_of

OBJECTS, BATCH = 100_000, 128
EVER = 1 << 62


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    index = Index(tmp_path_factory.mktemp("index") / "index.db", Metrics(CollectorRegistry()))
    number = index.namespace_id(
        Namespace(model="m", weights="w", dtype="bfloat16", page_size=64, tensors=(4096,), layers=(0, 1))
    )
    index.add_segment(number, (0,), 64, 1 << 17, Stripe.TENSOR)
    slots = slots_of(index.lease("me", number, OBJECTS, EVER))[:OBJECTS]
    records = np.zeros(OBJECTS, dtype=RECORD_DTYPE)
    records["slot"], records["generation"] = slots, 1
    assert index.publish("me", number, keys(0, OBJECTS), records).all()
    yield index
    index.close()


def keys(seed: int, count: int) -> bytes:
    """`count` keys; those of one seed are always the same."""
    return np.random.default_rng(seed).bytes(count * KEY_SIZE)


@pytest.mark.parametrize("stored", [True, False], ids=["all found", "none found"])
def test_lookup_of_128_keys(benchmark: Any, index: Index, stored: bool) -> None:
    wanted = keys(0, BATCH) if stored else keys(1, BATCH)
    found = benchmark(index.locate, 1, wanted)
    assert (found != NO_SLOT).all() == stored


def test_records_of_128_keys(benchmark: Any, index: Index) -> None:
    found = benchmark(index.lookup, 1, keys(0, BATCH))
    assert (found.records["slot"] != NO_SLOT).all()
