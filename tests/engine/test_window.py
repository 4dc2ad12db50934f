"""The window in real threads: reads and writes of a process never meet, waits are counted, off is off."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from tutti_sglang.engine import turns
from tutti_sglang.engine import window as engine_window
from tutti_sglang.engine.rows import Rows
from tutti_sglang.engine.window import LEAST_BYTES, Window
from tutti_sglang.metrics import Metrics

DRIVES = (0, 1)
LONG_AGO = -1e9


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


@pytest.fixture
def window(metrics: Metrics) -> Iterator[Window]:
    opened = Window(Rows(uuid.uuid4().hex), metrics)
    assert not opened.why_alone
    yield opened
    opened.close()


def _fail() -> None:
    raise ZeroDivisionError


def _now() -> float:
    return time.monotonic()


def test_threads_that_read_and_one_that_writes_never_meet(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_window, turns):
        monkeypatch.setattr(module, "PATIENCE", 60 * 10**9)  # the machine may be slow
    stop, reads, writes, met = threading.Event(), [0], [0], []
    lock = threading.Lock()

    def read() -> int:
        count = 0
        while not stop.is_set():
            with window.reading(DRIVES):
                with lock:
                    reads[0] += 1
                    if writes[0]:
                        met.append("a read starts beside a write")
                time.sleep(0.0002)
                with lock:
                    reads[0] -= 1
            count += 1
            time.sleep(0.001)
        return count

    def write() -> int:
        count = 0
        while not stop.is_set():
            with window.turn(DRIVES, _now(), hurry=count % 3 == 0) as mine:
                if mine:
                    with window.writing(DRIVES, 1 << 20):
                        with lock:
                            writes[0] += 1
                            if reads[0]:
                                met.append("a write starts beside a read")
                        time.sleep(0.0002)
                        with lock:
                            writes[0] -= 1
                    count += 1
                else:
                    window.pause()
        return count

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(read), pool.submit(read), pool.submit(read), pool.submit(write)]
        time.sleep(2)
        stop.set()
        counts = [each.result(20) for each in work]
    assert all(counts), counts
    assert not met


def test_what_waits_is_counted_by_reason(window: Window, metrics: Metrics) -> None:
    window.hear(1, 0)
    with window.turn(DRIVES, _now()) as mine:
        assert not mine
    with window.reading(DRIVES), window.turn(DRIVES, _now()) as mine:
        assert not mine
    window.hear(1, 1 << 62)
    with window.turn(DRIVES, _now()) as mine:
        assert mine
    window.hear(1, 0)
    with window.turn(DRIVES, LONG_AGO) as mine:
        assert mine
    with window.turn(DRIVES, _now(), hurry=True) as mine:
        assert mine
    assert {metrics.value("tutti_write_turns", reason=why) for why in ("window", "late", "waited for")} == {1}
    assert metrics.value("tutti_write_wait_seconds", reason="compute") > 0
    assert metrics.value("tutti_write_wait_seconds", reason="reads") > 0
    assert metrics.value("tutti_overlap_seconds") == 0


def test_a_write_that_fails_to_start_leaves_nothing_behind(window: Window) -> None:
    for attempt in (window.turn(DRIVES, _now()), window.writing(DRIVES, 1), window.reading(DRIVES)):
        with pytest.raises(ZeroDivisionError), attempt:
            _fail()
    with window.turn(DRIVES, _now()) as mine:
        assert mine


def test_loads_are_short_only_while_reads_may_come(window: Window) -> None:
    assert window.most_bytes(64 << 20) == 64 << 20
    with window.reading(DRIVES):
        pass
    assert window.most_bytes(64 << 20) == LEAST_BYTES
    assert window.most_bytes(1 << 20) == 1 << 20
    with window.turn(DRIVES, _now()), window.writing(DRIVES, 1 << 40):
        pass
    assert window.most_bytes(64 << 20) == 64 << 20  # such a drive writes as much in no time


def test_off_nothing_waits(metrics: Metrics) -> None:
    window = Window(Rows(uuid.uuid4().hex), metrics, enabled=False)
    window.hear(1, 0)
    with window.reading(DRIVES), window.turn(DRIVES, _now()) as mine, window.writing(DRIVES, 1):
        assert mine
    assert window.most_bytes(64 << 20) == 64 << 20
    assert metrics.value("tutti_write_turns") == 0
    window.close()
