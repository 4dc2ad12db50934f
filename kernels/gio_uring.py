"""The kernels of gio_uring, compiled by NVRTC for one GPU architecture; what the compiler says about them is kept."""

import io
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cuda.core import ObjectCode, Program, ProgramOptions

from tutti_sglang.errors import EngineError
from tutti_sglang.kernels import gio_native

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""What the kernels are compiled for in every test run."""

KERNELS = ("gio_uring", "gio_reap", "gio_abort")

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class Usage(NamedTuple):
    """What one thread of a kernel takes: registers, and bytes of local memory, which it should not need."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


class Compiled(NamedTuple):
    """Kernels for one architecture."""

    code: ObjectCode
    usage: dict[str, Usage]


@cache
def compile_kernels(architecture: str) -> Compiled:
    """Compile for `architecture`, as in "sm_90"; needs no GPU. Raises EngineError without the headers of libcu++."""
    headers = gio_native.cccl()
    if headers is None:
        raise EngineError("The headers of libcu++ were not found", "pip install nvidia-cuda-cccl")
    options = ProgramOptions(
        name="gio_uring.cu",
        arch=architecture,
        std="c++17",
        include_path=[str(headers), str(gio_native.FOLDER)],
        ptxas_options=["-v"],
        lineinfo=True,
    )
    log = io.StringIO()
    source = (Path(gio_native.FOLDER) / "gio_uring.cu").read_text()
    code = Program(source, "c++", options).compile("cubin", logs=log)
    return Compiled(code, _usage(log.getvalue()))


def _usage(log: str) -> dict[str, Usage]:
    """Kernel → what ptxas said of it."""
    usage = {}
    for part in re.split(r"(?=Compiling entry function)", log):
        if entry := _ENTRY.search(part):
            memory, registers = _MEMORY.search(part), _REGISTERS.search(part)
            assert memory
            assert registers
            usage[entry[1]] = Usage(int(registers[1]), *map(int, memory.groups()))
    return usage
