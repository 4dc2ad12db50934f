"""System calls on one drive, made beside the caller: a file system that hangs costs whoever asks a moment, once, and
nobody else anything."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

ANSWER_SECONDS = 2.0
"""For what needs no data to move: stat, open, rename, unlink."""
DATA_SECONDS = 20.0
"""For what does, as long as a write may take: sync; zeros where there is no fallocate."""
TURN_SECONDS = DATA_SECONDS
"""What others asked for before may take so long."""
IDLE_SECONDS = 2.0
"""Then the thread ends: a store that could not be closed leaves none behind."""


class _Errand(Generic[T]):
    """One call; `late`: nobody waits for it any more, and `undo` takes back what it made."""

    def __init__(self, act: Callable[[], T], undo: Callable[[T], None] | None) -> None:
        self.act, self.undo = act, undo
        self.begun, self.done = threading.Event(), threading.Event()
        self.late = False
        self.result: T | None = None
        self.error: BaseException | None = None


class Errands:
    """One thread makes the calls, one after the other: a file is unlinked after its late creation, and a descriptor
    closed after its last use. Thread safe, not fork safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Errand[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late = 0
        self._closed = False

    @property
    def stuck(self) -> bool:
        """Whether a call that nobody waits for any more has not come back."""
        return self._late > 0

    def call(
        self,
        act: Callable[[], T],
        seconds: float,
        undo: Callable[[T], None] | None = None,
        turn: float = TURN_SECONDS,
    ) -> T:
        """What `act` returns, or raises. TimeoutError when it takes longer than `seconds` from its turn on, for which
        it waits `turn` at most, and at once while an earlier one is stuck: it is not made then. What comes back too
        late is undone."""
        errand = _Errand(act, undo)
        with self._lock:
            if self.stuck or self._closed:
                raise _timeout()
            self._put(errand)
        errand.begun.wait(turn)
        if not errand.done.wait(seconds):
            with self._lock:
                if not errand.done.is_set():
                    errand.late = True
                    self._late += 1
                    raise _timeout()
        if errand.error is not None:
            raise errand.error
        return errand.result  # type: ignore[return-value]

    def later(self, act: Callable[[], object]) -> None:
        """Have it done after all that was asked for before; nobody waits, and nobody learns of an error."""
        with self._lock:
            if not self._closed:
                self._put(_Errand(act, None))

    def close(self, last: Callable[[], None]) -> None:
        """Do `last` after all that was asked for, be it when what is stuck comes back; nothing can be asked any
        more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._put(_Errand(last, None))
            self._queue.put(None)
            thread = self._thread
        assert thread
        thread.join(0.0 if self.stuck else ANSWER_SECONDS)

    def _put(self, errand: _Errand[Any]) -> None:
        if self._thread is None:
            # A daemon: a file system that never answers must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="tutti-drive", daemon=True)
            self._thread.start()
        self._queue.put(errand)

    def _run(self) -> None:
        while errand := self._next():
            errand.begun.set()
            self._do(errand)
            with self._lock:
                errand.done.set()
                self._late -= errand.late
                undo = errand.undo if errand.late and errand.error is None else None
            if undo:
                with contextlib.suppress(OSError):
                    undo(errand.result)

    def _next(self) -> _Errand[Any] | None:
        try:
            return self._queue.get(timeout=IDLE_SECONDS)
        except Empty:
            with self._lock:
                if self._queue.empty():
                    self._thread = None  # the next one to ask starts another
                    return None
            return self._queue.get()

    def _do(self, errand: _Errand[Any]) -> None:
        try:
            errand.result = errand.act()
        except BaseException as error:  # noqa: BLE001
            errand.error = error


def _timeout() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
