"""Stand-ins for cuFile and the CUDA driver where there is no device: host memory plays the device's."""

import os
import threading
from typing import Any

import numpy as np
import pytest

from tutti_sglang import memory
from tutti_sglang.engine import gds as engine_gds
from tutti_sglang.kernels import gds
from tutti_sglang.kernels.gds import CuFile

CONTEXT = 7


class Refused(Exception):
    """As cuda.bindings' cuFileError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"refused ({status})")
        self.status = status


class Library:
    """What of cuda.bindings.cufile is used. It moves what was registered and nothing else, and checks who asks."""

    def __init__(self) -> None:
        from cuda.bindings import cufile

        self.FileHandleType, self.Descr = cufile.FileHandleType, cufile.Descr
        self.memory: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.calls: list[tuple[int, int, int]] = []
        self.refuses: int = 0
        self.open = False
        self.contexts: dict[int, int] = {}

    def driver_open(self) -> None:
        self._check()
        self.open = True

    def driver_close(self) -> None:
        assert not self.memory
        assert not self.handles
        self.open = False

    def buf_register(self, address: int, size: int, flags: int) -> None:
        self._check()
        self.memory[address] = size

    def buf_deregister(self, address: int) -> None:
        del self.memory[address]

    def handle_register(self, descr: int) -> int:
        self._check()
        seen = self.Descr.from_ptr(descr)
        assert seen.type == self.FileHandleType.OPAQUE_FD
        fd = int(np.ravel(seen.handle.fd)[0])
        handle = 1000 + fd
        assert handle not in self.handles
        self.handles[handle] = fd
        return handle

    def handle_deregister(self, handle: int) -> None:
        del self.handles[handle]

    def read(self, handle: int, base: int, size: int, offset: int, place: int) -> int:
        return self._move(os.preadv, handle, base, size, offset, place)

    def write(self, handle: int, base: int, size: int, offset: int, place: int) -> int:
        return self._move(os.pwritev, handle, base, size, offset, place)

    def _move(self, call: Any, handle: int, base: int, size: int, offset: int, place: int) -> int:
        self._check()
        assert self.open
        assert self.contexts.get(threading.get_ident()) == CONTEXT, "cuFile goes by the thread's current context"
        assert place + size <= self.memory[base]
        self.calls.append((offset, place, size))
        try:
            return int(call(self.handles[handle], [memory.view(base + place, size)], offset))
        except OSError as error:
            raise Refused(error.errno or 0) from error  # as cuda.bindings does with an errno

    def _check(self) -> None:
        if self.refuses:
            raise Refused(self.refuses)


class Driver:
    """What of cuda.bindings.driver is used."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, CONTEXT

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        self._library.contexts[threading.get_ident()] = context
        return (0,)


def stand_in() -> tuple[Library, CuFile]:
    """The library, and what calls it."""
    library = Library()
    return library, CuFile(library, Driver(library))


def install(monkeypatch: pytest.MonkeyPatch) -> list[Library]:
    """In the place of cuFile for what starts one from now on; the libraries that it starts."""
    started: list[Library] = []

    def start() -> CuFile:
        library, made = stand_in()
        started.append(library)
        return made

    for module in (gds, engine_gds):
        monkeypatch.setattr(module, "CuFile", start)
    return started
