"""The object store as its callers see it."""

from pathlib import Path

from tests.store.kit import get, keys, namespace, open_store, put


def test_what_was_put_comes_back_from_staging_from_the_drive_and_after_a_restart(disk: Path) -> None:
    store = open_store(disk)
    ns = store.attach(namespace())
    assert put(store, ns, *range(20)).all()
    assert all(get(store, ns, *range(20)))
    assert store.drain(8)
    assert store.stats().accepted == 0
    assert get(store, ns, *range(18, 22)) == [True, True, False, False]
    assert store.lookup(ns, keys(*range(18, 22))).tolist() == [True, True, False, False]
    assert store.close()
    store = open_store(disk)
    ns = store.attach(namespace())
    assert all(get(store, ns, *range(20)))
    assert store.close()
