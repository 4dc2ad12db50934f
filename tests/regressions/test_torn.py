"""TORN: bytes that are incomplete or spoiled are never handed out."""

from pathlib import Path

from tests.store.kit import MIB, SLOTS, Weather, close_good, eventually, get, lookup, namespace, open_store, put
from tutti_sglang.testing.faults import EVERY_BLOCK, WRITES, Fault, FaultPlan

LAST_TENSOR = SLOTS * (8192 + 8192 + 4096)
"""Where the last tensors of a group lie: behind all others."""


def test_others_see_an_object_only_when_its_last_tensor_is_written(disk: Path) -> None:
    """B02: elsewhere a page had its final name while it was still being written."""
    weather = Weather()
    writer, reader = open_store(disk, seam=weather), open_store(disk)
    ns = writer.attach(namespace())
    assert reader.attach(namespace()) == ns
    weather.plan = FaultPlan({Fault.STALL: EVERY_BLOCK}, operations=WRITES, begin=MIB + LAST_TENSOR)
    assert all(put(writer, ns, *range(10)))
    assert eventually(lambda: weather.stalled), "three of four tensors are on the drive"
    for _ in range(20):
        assert not any(lookup(reader, ns, *range(10)))
        assert not any(get(reader, ns, *range(10)))
        assert all(get(writer, ns, *range(10))), "who wrote it serves it from memory"
    weather.plan.gate.open()
    assert eventually(lambda: all(lookup(reader, ns, *range(10))))
    assert all(get(reader, ns, *range(10)))
    assert reader.close()
    close_good(writer)


def test_every_key_that_is_claimed_can_be_read_after_many_more_were_written_than_fit(disk: Path) -> None:
    """B07: elsewhere keys were listed whose data was gone."""
    store = open_store(disk, max_size=4 * MIB)
    ns = store.attach(namespace())
    for start in range(0, 400, 20):
        put(store, ns, *range(start, start + 20))
    assert store.drain(30)
    claimed = lookup(store, ns, *range(400))
    assert 0 < sum(claimed) < 400
    assert get(store, ns, *range(400)) == claimed
    close_good(store)
