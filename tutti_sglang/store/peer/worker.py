"""The process in which the fleet's engine runs: `python -m tutti_sglang.store.peer.worker SOCKET MEMORY SIZE`.

It is started by `link`, ends with it, and may be killed at any time.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from tutti_sglang.config import PeerConfig
from tutti_sglang.errors import TuttiError
from tutti_sglang.store.peer.base import Peer, PeerError, Place, connect
from tutti_sglang.store.peer.frames import OPENED, Reply, Request, Unpacker, pack

THREADS = 6
"""Calls at once."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the other side is gone."""
    channel_fd, memory_fd, size = map(int, sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the server, which closes us
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The engine's own log has a line for each call. It reads the environment of C, not Python's copy.
    os.putenv("GLOG_minloglevel", "2")
    os.putenv("MC_LOG_LEVEL", "ERROR")
    channel = socket.socket(fileno=channel_fd)
    view = np.frombuffer(mmap.mmap(memory_fd, size), dtype=np.uint8)
    try:
        settings = msgspec.json.decode(sys.argv[4], type=PeerConfig)
        peer = connect(settings, Place(view.ctypes.data, size))
    except (PeerError, TuttiError, ImportError) as error:
        channel.sendall(pack(Reply(OPENED, [], str(error))))
        return
    _Service(channel, peer, view.ctypes.data).run()
    with contextlib.suppress(PeerError):
        peer.close()
    os._exit(0)  # threads of the engine may hang for good


class _Service:
    def __init__(self, channel: socket.socket, peer: Peer, base: int) -> None:
        self._channel, self._peer, self._base = channel, peer, base
        self._sending = threading.Lock()

    def run(self) -> None:
        """Until the socket is closed."""
        self._send(Reply(OPENED, []))
        unpacker = Unpacker()
        pool = ThreadPoolExecutor(THREADS)
        while data := self._receive():
            for request in unpacker.feed(data, Request):
                pool.submit(self._serve, request)
        pool.shutdown(wait=False, cancel_futures=True)

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(1 << 18)
        except OSError:
            return b""

    def _serve(self, request: Request) -> None:
        try:
            reply = Reply(request.number, self._act(request))
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is an answer
            reply = Reply(request.number, [], str(error) or type(error).__name__)
        self._send(reply)

    def _act(self, request: Request) -> list[int]:
        places = [Place(self._base + offset, request.size) for offset in request.offsets]
        match request.operation:
            case "exists":
                return [int(state) for state in self._peer.exists(request.names)]
            case "get":
                return [int(state) for state in self._peer.get(request.names, places)]
            case "put":
                return [int(state) for state in self._peer.put(request.names, places)]
            case "remove":
                return [self._peer.remove(request.names[0])]
            case "health":
                self._peer.health()
                return []

    def _send(self, reply: Reply) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._channel.sendall(pack(reply))


if __name__ == "__main__":
    main()
