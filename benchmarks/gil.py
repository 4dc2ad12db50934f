"""How long a process holds the GIL: a second process looks at CPython's lock some ten thousand times a second.

Exact counters would need a build of CPython of its own. `process_vm_readv` reads the one word `locked`, found by the
shape of its neighbours (CPython ≥ 3.11, Include/internal/pycore_gil.h: interval, last_holder, locked), and costs the
observed process nothing but a share of a core.
"""

import ctypes
import os
import struct
import subprocess
import sys
from types import TracebackType
from typing import NamedTuple, Self

_PR_SET_PTRACER = 0x59616D61
_MARK = 4321  # µs: a switch interval that no other word of the runtime has by chance
_SEARCH = 1 << 20

_SAMPLER = """
import ctypes, os, select, sys, time
pid, address = int(sys.argv[1]), int(sys.argv[2])
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
word = ctypes.c_int()
here, there = Vector(ctypes.addressof(word), 4), Vector(address, 4)
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
try:  # else it would look only when the observed threads leave it a core
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
except OSError:
    pass
sys.stdin.readline()
arguments = pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0
print("ready" if read(*arguments) == 4 else os.strerror(ctypes.get_errno()), flush=True)
held = total = samples = 0
last = time.perf_counter()
while not select.select([0], [], [], 5e-5)[0]:
    read(*arguments)
    now = time.perf_counter()
    held += (now - last) * word.value
    total += now - last
    samples += 1
    last = now
print(held, total, samples, flush=True)
"""


class Held(NamedTuple):
    """Seconds that the lock was seen held, out of how many, by how many looks."""

    held: float
    total: float
    samples: int


class GilSampler:
    """Context manager around what is measured; `result` is set at its end, None (with `reason`) where it cannot be."""

    def __init__(self) -> None:
        self.result: Held | None = None
        self.reason = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        address = _locked_address()
        if address is None:
            self.reason = f"the GIL of Python {sys.version.split()[0]} was not found in memory"
            return self
        command = [sys.executable, "-I", "-S", "-c", _SAMPLER, str(os.getpid()), str(address)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, self._process.pid, 0, 0, 0)
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "ready":
            self.reason = f"process_vm_readv: {answer}"
            self._process.communicate()
            self._process = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process:
            output, _ = self._process.communicate("\n", timeout=10)
            held, total, samples = output.split()
            self.result = Held(float(held), float(total), int(samples))


def _locked_address() -> int | None:
    """The address of `locked`: behind the marked switch interval and, as last holder, this very thread."""
    api = ctypes.pythonapi
    api.PyThreadState_Get.restype = ctypes.c_void_p
    pattern = struct.pack("<QQ", _MARK, api.PyThreadState_Get())
    start = ctypes.addressof(ctypes.c_char.in_dll(api, "_PyRuntime"))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_MARK / 1e6)
    try:
        offset = _read_self(start, _SEARCH).find(pattern)
    finally:
        sys.setswitchinterval(interval)
    return None if offset < 0 else start + offset + 16


def _read_self(address: int, size: int) -> bytes:
    """What is readable of [address, address + size)."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(size)
    except OSError:
        return b""
