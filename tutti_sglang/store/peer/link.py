"""The worker process as seen from here: started, asked with a deadline, killed when it hangs, started again.

No caller starts it, waits for its start, or learns of an error otherwise than by an answer that is missing.
"""

import contextlib
import itertools
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tutti_sglang.config import PeerConfig
from tutti_sglang.store.peer.breaker import Breaker
from tutti_sglang.store.peer.frames import OPENED, Operation, Reply, Request, Unpacker, pack
from tutti_sglang.store.peer.memory import SharedMemory, Span

WORKER = [sys.executable, "-m", "tutti_sglang.store.peer.worker"]

START_SECONDS = 20.0
"""Then a worker that has not joined the fleet is killed: Mooncake's client tries for 90 s."""

STUCK_SECONDS = 5.0
"""So long after its deadline a call may still be answered; then the worker is killed, and its memory comes back."""

PROBE_SECONDS = 2.0
"""For an attempt to find the fleet well again."""

STOP_SECONDS = 2.0
"""For a worker to leave the fleet in good order."""

_TICK = 0.05
_MOST = 64  # calls under way: what they say fits into the socket's buffer, so that sending never waits


class Call:
    """One call under way. `span` is the worker's until the call is `over`: answered, or the worker is dead."""

    def __init__(self, request: Request, span: Span | None, deadline: float) -> None:
        self.request, self.span, self.deadline = request, span, deadline
        self.reply: Reply | None = None
        self.abandoned = False
        self.over = threading.Event()

    @property
    def states(self) -> list[int] | None:
        """The answer; None where there is none, or the call failed as a whole."""
        return self.reply.states if self.reply and not self.reply.error else None


class Load(NamedTuple):
    """The memory of a call, and where in the shared memory each of its objects of `size` bytes lies."""

    span: Span
    offsets: list[int]
    size: int

    @classmethod
    def of(cls, span: Span, objects: int, stride: int, size: int) -> "Load":
        """One after the other, `stride` bytes apart."""
        return cls(span, list(range(span.offset, span.offset + objects * stride, stride)), size)


class Link:
    """Thread safe, not fork safe. `breaker`: whether calls may go; its attempts are made here."""

    def __init__(self, settings: PeerConfig, memory: SharedMemory, report: Callable[[str], None]) -> None:
        """`report`: told of each change in one line."""
        self._settings, self._memory, self._report = settings, memory, report
        self.breaker = Breaker(self._changed)
        self._lock = threading.Lock()
        self._numbers = itertools.count(OPENED + 1)
        self._calls: dict[int, Call] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unpacker = Unpacker()
        self._started, self._ready = 0.0, False
        self._probe: Call | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tutti-peer", daemon=True)
        self.on_change: Callable[[bool], None] = lambda _: None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def worker(self) -> int:
        """Process id of the worker, 0 where there is none."""
        process = self._process
        return process.pid if process else 0

    def begin(self, operation: Operation, names: list[str], deadline: float, load: "Load | None" = None) -> Call | None:
        """Ask; hand the call to `end`. None where the fleet is not asked now: the load's span stays the caller's."""
        return self._send(operation, names, deadline, load) if self.breaker.closed else None

    def end(self, call: Call) -> Call:
        """Wait for the answer until the call's deadline. After that its span is the caller's again, unless the call is
        `abandoned`: then it comes free by itself, later."""
        call.over.wait(max(0.0, call.deadline - time.monotonic()))
        with self._lock:
            call.abandoned = not call.over.is_set()
        if call.abandoned:
            # A lookup has so little time that a busy processor can take it.
            operation = call.request.operation
            self.breaker.failed(f"no answer to {operation} in time", late=operation != "exists")
        elif call.reply and call.reply.error:
            self.breaker.failed(call.reply.error)
        return call

    def ask(self, operation: Operation, names: list[str], deadline: float) -> list[int] | None:
        """Begin and end a call without a load; None for whatever is no answer."""
        call = self.begin(operation, names, deadline)
        return self.end(call).states if call else None

    def close(self) -> None:
        """Leave the fleet; takes at most about STOP_SECONDS. No call may be under way."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS + 2.0)

    def _send(self, operation: Operation, names: list[str], deadline: float, load: "Load | None") -> Call | None:
        offsets, size = (load.offsets, load.size) if load else ([], 0)
        request = Request(next(self._numbers), operation, names, offsets, size)
        call = Call(request, load.span if load else None, deadline)
        with self._lock:
            if self._channel is None or not self._ready or len(self._calls) >= _MOST:
                return None
            self._calls[request.number] = call
            try:
                self._channel.sendall(pack(request))
            except OSError:  # the link's thread will find out; what was sent in part will not be understood
                self._channel.close()
        return call

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 - the thread must live
                self._drop(f"{type(error).__name__}: {error}")
                time.sleep(_TICK)
        self._stop()

    def _step(self) -> None:
        if self._process is None:
            if self.breaker.due():
                self._spawn()
            else:
                self._closing.wait(_TICK)
            return
        self._receive()
        self._watch()

    def _spawn(self) -> None:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        with theirs:
            descriptors = (theirs.fileno(), self._memory.fd)
            arguments = [*map(str, descriptors), str(self._memory.size), msgspec.json.encode(self._settings).decode()]
            self._process = subprocess.Popen(
                [*WORKER, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        self._unpacker, self._started = Unpacker(), time.monotonic()
        with self._lock:
            self._channel = mine

    def _receive(self) -> None:
        assert self._channel
        channel = self._channel
        try:
            if not select.select([channel], [], [], _TICK)[0]:
                return
            data = channel.recv(1 << 18)
        except (OSError, ValueError):
            data = b""
        if not data:
            self._drop("its worker process ended")
            return
        for reply in self._unpacker.feed(data, Reply):
            if reply.number == OPENED:
                self._opened(reply)
            else:
                self._answer(reply)

    def _opened(self, reply: Reply) -> None:
        if reply.error:
            self._drop(reply.error)
        else:
            self._ready = True
            self.breaker.tried(True)

    def _answer(self, reply: Reply) -> None:
        with self._lock:
            call = self._calls.pop(reply.number, None)
            if call is None:
                return
            call.reply = reply
            call.over.set()
        if call.abandoned:
            self._release(call)

    def _watch(self) -> None:
        now = time.monotonic()
        if not self._ready:
            if now - self._started > START_SECONDS:
                self._drop(f"no connection within {START_SECONDS:.0f} s")
            return
        with self._lock:
            stuck = any(now > call.deadline + STUCK_SECONDS for call in self._calls.values())
        if stuck:
            self._drop("its worker process hung")
            return
        self._try_again(now)

    def _try_again(self, now: float) -> None:
        """The attempts of the breaker while a worker runs."""
        if self._probe is None:
            if self.breaker.due():
                self._probe = self._send("health", [], now + PROBE_SECONDS, None)
        elif self._probe.over.is_set():
            self.breaker.tried(self._probe.states is not None, self._probe.reply.error if self._probe.reply else "")
            self._probe = None
        elif now > self._probe.deadline:
            self._drop("no answer to a probe")

    def _drop(self, reason: str) -> None:
        """Kill the worker. When this returns it writes nowhere any more, and all it had to answer is lost."""
        process, self._process = self._process, None
        if process:
            process.kill()
            process.wait()
        with self._lock:
            if self._channel:
                self._channel.close()
            self._channel, self._ready, self._probe = None, False, None
            lost, self._calls = list(self._calls.values()), {}
            for call in lost:
                call.over.set()
        for call in lost:
            if call.abandoned:
                self._release(call)
        self.breaker.tried(False, reason)

    def _release(self, call: Call) -> None:
        if call.span:
            self._memory.give(call.span)

    def _stop(self) -> None:
        with self._lock:
            if self._channel:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self._drop("closed")

    def _changed(self, works: bool, reason: str) -> None:
        self.on_change(works)
        if not self._closing.is_set():
            self._report("the fleet is asked now" if works else f"the fleet is not asked for a while: {reason}")
