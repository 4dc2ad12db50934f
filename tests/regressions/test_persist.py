"""PERSIST: what was stored outlives the process, however it ends, and nothing depends on an orderly end."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.kit import close_good, eventually, get, lookup, namespace, open_store, put

ROOT = Path(__file__).parents[2]


def test_pages_of_the_last_request_are_stored_while_the_process_idles(disk: Path) -> None:
    """B71: elsewhere what the last request left was written only when the next one came."""
    script = f"""
import time
from pathlib import Path
from tests.store.kit import *
store = open_store(Path({str(disk)!r}))
assert all(put(store, store.attach(namespace()), *range(20)))
print("idle", flush=True)
time.sleep(100)
"""
    reader = open_store(disk)
    ns = reader.attach(namespace())
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "idle\n"
    assert eventually(lambda: all(lookup(reader, ns, *range(20))))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert reader.close()
    store = open_store(disk)
    assert all(get(store, store.attach(namespace()), *range(20)))
    close_good(store)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_store_is_taken_over_from_a_process_that_ended_anyhow(disk: Path, end: signal.Signals) -> None:
    """B68, B72: elsewhere a signal bypassed the clean-up, and what was left could not be used or blocked others."""
    script = f"""
import time
from pathlib import Path
from tests.store.kit import *
store = open_store(Path({str(disk)!r}))
ns = store.attach(namespace())
store_pages(store, ns, *range(20))
number = 1000
print("writing", flush=True)
while True:
    put(store, ns, *range(number, number + 10))
    number += 10
"""
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    assert process.stdout.readline() == "writing\n"
    process.send_signal(end)
    process.communicate(timeout=30)
    store = open_store(disk)
    ns = store.attach(namespace())
    assert store._parts.index.usage().leased == 0, "what the dead one held is free at once"
    found = lookup(store, ns, *range(20))
    assert get(store, ns, *range(20)) == found
    assert all(put(store, ns, *range(20)))
    assert store.drain(8)
    assert all(get(store, ns, *range(20)))
    close_good(store)


def test_a_chain_without_its_head_is_no_prefix(opened: Callable[..., Any]) -> None:
    """B70: elsewhere many pages were on the disk and none could be used, since the first ones were never written."""
    from tests.integration.host_pools import fill, mha_pool, slots
    from tests.regressions.test_key import keys

    pool = mha_pool()
    fill(pool, 1)
    backend = opened(pool)
    names = keys(10)
    assert all(backend.batch_set_v1(names[5:], slots(pool, [5, 6, 7, 8, 9])))
    assert backend.batch_exists(names) == 0
    assert backend.batch_exists(names[5:]) == 5
    assert all(backend.batch_set_v1(names[:5], slots(pool, [0, 1, 2, 3, 4])))
    assert backend.batch_exists(names) == 10
