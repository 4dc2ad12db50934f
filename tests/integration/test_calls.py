"""The gate between SGLang and the tier: keys, the count of calls inside, and exceptions that stay here."""

import hashlib
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tutti_sglang.integration.calls import Calls, guarded, key_bytes
from tutti_sglang.metrics import Metrics

HEX = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(5)]


def test_a_page_hash_is_taken_as_it_is() -> None:
    assert key_bytes(HEX) == bytes.fromhex("".join(HEX))
    assert key_bytes([]) == b""


@given(st.lists(st.text(max_size=70) | st.sampled_from(HEX), max_size=6))
def test_every_key_has_32_bytes_of_its_own(keys: list[str]) -> None:
    binary = key_bytes(keys)
    assert binary == b"".join(key_bytes([key]) for key in keys)
    assert len(binary) == 32 * len(keys)
    assert len({binary[i * 32 : i * 32 + 32] for i in range(len(keys))}) == len(set(keys))


@pytest.mark.parametrize("key", ["A" * 64, " " + "a" * 63, "g" * 64, "", "ä" * 64, "٣" * 64, "\ud800"])
def test_what_only_looks_like_a_hash_is_hashed(key: str) -> None:
    binary = key_bytes([key])
    assert len(binary) == 32
    assert binary not in (bytes.fromhex(HEX[0]), hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest())


class _Backend:
    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self._calls = Calls(self.metrics)

    @guarded(lambda keys, *_, **__: [False] * len(keys))
    def read(self, keys: list[str], act: Any = None) -> list[bool]:
        return act() if act else [True] * len(keys)


@pytest.mark.parametrize("error", [OSError(5, "EIO"), RuntimeError("x"), MemoryError(), AssertionError()])
def test_an_exception_becomes_the_answer_of_a_miss(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    backend = _Backend()

    def fail() -> Any:
        raise error

    for _ in range(3):
        assert backend.read(["a", "b"], act=fail) == [False, False]
    assert backend.metrics.value("tutti_call_errors", call="read") == 3
    assert len(caplog.records) == 1, "once, not for each call"
    assert caplog.records[0].exc_info is not None
    assert backend.read(["a"]) == [True]


def test_an_interrupt_passes() -> None:
    def stop() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _Backend().read(["a"], act=stop)


def test_shut_lets_none_in_and_waits_for_those_inside() -> None:
    backend = _Backend()
    inside, leave, answers = threading.Event(), threading.Event(), []

    def act() -> list[bool]:
        inside.set()
        assert leave.wait(60)
        return [True]

    call = threading.Thread(target=lambda: answers.append(backend.read(["a"], act)))
    call.start()
    assert inside.wait(60)
    assert not backend._calls.shut(0)
    assert backend.read(["a"]) == [False]
    leave.set()
    assert backend._calls.shut(60)
    call.join(60)
    assert answers == [[True]]
    backend._calls.open()
    assert backend.read(["a"]) == [True]
