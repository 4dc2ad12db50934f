"""The gate between SGLang's threads and ours: keys in, no exception out, nothing in flight once it is shut."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from tutti_sglang.metrics import Metrics

logger = logging.getLogger(__name__)

KEY_BYTES = 32
LOG_SECONDS = 60.0
"""A kind of failure is logged once in this time; the metric counts each."""

Method = TypeVar("Method", bound=Callable[..., Any])


def key_bytes(keys: list[str]) -> bytes:
    """32 bytes for each key: a page hash (64 hex digits, sglang mem_cache/utils.py:141) as it is, any other key by a
    SHA-256 that no page hash equals."""
    joined = "".join(keys)
    if joined.isascii() and joined == joined.lower() and set(map(len, keys)) <= {2 * KEY_BYTES}:
        try:
            binary = bytes.fromhex(joined)
        except ValueError:
            binary = b""
        if len(binary) == KEY_BYTES * len(keys):  # fromhex skips blanks
            return binary
    if len(keys) == 1:
        return hashlib.sha256(b"tutti key\0" + joined.encode("utf-8", "surrogatepass")).digest()
    return b"".join(key_bytes([key]) for key in keys)


class Calls:
    """Counts the calls inside a backend; shut, it lets none in and waits for those inside."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._condition = threading.Condition()
        self._inside = 0
        self._shut = False
        self._logged: dict[tuple[str, str], float] = {}

    def shut(self, timeout: float) -> bool:
        """No call enters any more. True when, within `timeout` seconds, none is inside either."""
        with self._condition:
            self._shut = True
            return self._condition.wait_for(lambda: not self._inside, timeout)

    def open(self) -> None:
        """Let calls in again."""
        with self._condition:
            self._shut = False

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Whether the call may go on; it counts as inside until the block ends."""
        with self._condition:
            entered = not self._shut
            self._inside += entered
        try:
            yield entered
        finally:
            if entered:
                with self._condition:
                    self._inside -= 1
                    self._condition.notify_all()

    def report(self, call: str, error: Exception) -> None:
        """Count an exception that SGLang must not see; log its stack unless the same was logged a moment ago."""
        self._metrics.add("tutti_call_errors", call=call)
        kind, now = (call, type(error).__name__), time.monotonic()
        if now - self._logged.get(kind, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged[kind] = now
            logger.error("tutti: %s failed and is answered as a miss: %r", call, error, exc_info=error)


def guarded(answer: Callable[..., Any]) -> Callable[[Method], Method]:
    """For a method of an object with `_calls`: where it may not run, or raises, `answer(*arguments)` is returned."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._calls.enter() as entered:
                if entered:
                    try:
                        return method(self, *args, **kwargs)
                    except Exception as error:  # noqa: BLE001 - nothing of ours may end a thread of SGLang
                        self._calls.report(method.__name__, error)
            return answer(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
