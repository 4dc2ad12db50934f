"""The store keeps its promises over the gio engine: every byte goes through IOCBs, NVMe commands and a controller."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.store import kit
from tutti_sglang.engine.gio import GioEngine
from tutti_sglang.kernels import gio_native
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import ObjectStore


@pytest.mark.skipif(gio_native.compiler() is None, reason="no C++ compiler")
def test_what_was_put_is_had_after_a_restart(disk: Path, tmp_path: Path) -> None:
    native = gio_native.current(tmp_path)
    settings = kit.config(disk / "a", disk / "b")
    numbers = range(40)
    for round_ in range(2):
        engine = GioEngine(settings.segment_size, 4, settings.max_io, native)
        store = ObjectStore(settings, metrics=Metrics(CollectorRegistry()), engine=engine)
        ns = store.attach(kit.namespace())
        if round_ == 0:
            assert all(kit.put(store, ns, *numbers))
            assert store.drain(8)
        pages = kit.Pages(len(numbers)).wipe()
        assert store.get(ns, kit.keys(*numbers), pages.rows, kit.soon()).all()
        assert all(pages.holds(i, i) for i in numbers)
        kit.close_good(store)
