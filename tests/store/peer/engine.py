"""A worker whose engine keeps objects as files in the directory that `master` names, and does what `mood` there says:
the deterministic twin of a fleet, for what a real one does only now and then."""

import ctypes
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tutti_sglang.config import PeerConfig
from tutti_sglang.store.peer import worker
from tutti_sglang.store.peer.base import Peer, PeerError, Place, State

MOODS = ("well", "down", "slow", "hang", "die", "fail", "flip", "swap", "short", "late")


class FilePeer:
    """See base.Peer."""

    def __init__(self, settings: PeerConfig, _: Place) -> None:
        self._folder = Path(settings.master)
        if self._mood() == "down":
            raise PeerError("the fleet is down")

    def exists(self, names: Sequence[str]) -> list[State]:
        self._act()
        return [State.DONE if (self._folder / name).exists() else State.ABSENT for name in names]

    def get(self, names: Sequence[str], places: Sequence[Place]) -> list[State]:
        mood = self._act("get")
        states = []
        for number, (name, place) in enumerate(zip(names, places, strict=True)):
            path = self._folder / (names[number - 1] if mood == "swap" else name)
            data = bytearray(path.read_bytes()) if path.exists() else b""
            if mood == "flip" and data:
                data[number * 997 % len(data)] ^= 1 << number % 8
            if mood == "short" and number % 2:
                data = data[: len(data) // 2]
            ctypes.memmove(place.address, bytes(data), min(len(data), place.size))
            if mood == "die" and number == len(names) // 2:
                os._exit(9)
            states.append(State.DONE if data else State.ABSENT)
        if mood == "late":
            time.sleep(1.5)  # after the deadline; the bytes come again, into memory that must be nobody else's
            for place in places:
                ctypes.memset(place.address, 0x55, place.size)
        return states

    def put(self, names: Sequence[str], places: Sequence[Place]) -> list[State]:
        self._act()
        states = []
        for name, place in zip(names, places, strict=True):
            path = self._folder / name
            states.append(State.EXISTS if path.exists() else State.DONE)
            path.write_bytes(ctypes.string_at(place.address, place.size))
        return states

    def remove(self, prefix: str) -> int:
        paths = list(self._folder.glob(f"{prefix}*"))
        for path in paths:
            path.unlink()
        return len(paths)

    def health(self) -> None:
        self._act()

    def close(self) -> None:
        pass

    def _mood(self) -> str:
        return str(json.loads((self._folder / "mood").read_text()))

    def _act(self, operation: str = "") -> str:
        mood = self._mood()
        if mood == "down":
            raise PeerError("the fleet is down")
        if mood == "hang" or (mood == "hang get" and operation == "get"):
            time.sleep(3600)
        if mood == "slow":
            time.sleep(0.15)
        if mood == "fail" and operation == "get":
            raise PeerError("nothing arrives")
        return mood


def _connect(settings: PeerConfig, memory: Place) -> Peer:
    return FilePeer(settings, memory)


if __name__ == "__main__":
    worker.connect = _connect
    worker.main()
