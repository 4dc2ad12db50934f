"""The same source as kernels: it compiles for every architecture, keeps in registers, and has the instructions that its
explanations promise."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tutti_sglang.kernels import gdrcopy, gio_native

pytest.importorskip("cuda.core", reason="cuda-python is not installed: the kernels cannot be compiled")
from tutti_sglang.kernels import gio_uring

REGISTERS = 96  # of 65536 per SM: 10 blocks of 64 threads on each SM stay resident
PAGE = Path(__file__).parents[2] / "docs" / "gio-uring.md"

pytestmark = pytest.mark.skipif(gio_native.cccl() is None, reason="the headers of libcu++ are not installed")


def nvdisasm() -> str | None:
    """The disassembler, of CUDA or of Triton's wheel."""
    wheels = (Path(folder) / "triton/backends/nvidia/bin/nvdisasm" for folder in sys.path)
    return shutil.which("nvdisasm") or next((str(path) for path in wheels if path.exists()), None)


@pytest.mark.parametrize("architecture", gio_uring.ARCHITECTURES)
def test_the_kernels_need_no_local_memory(architecture: str) -> None:
    usage = gio_uring.compile_kernels(architecture).usage
    assert set(usage) == set(gio_uring.KERNELS)
    for name, each in usage.items():
        print(f"{architecture} {name}: {each.registers} registers, {each.stack + each.spill_stores} bytes of stack")
        assert (each.stack, each.spill_stores, each.spill_loads) == (0, 0, 0), name
        assert each.registers <= REGISTERS, name
        assert each.registers == recorded(name, architecture), "docs/gio-uring.md is old"


def recorded(kernel: str, architecture: str) -> int:
    """Registers by the table of docs/gio-uring.md."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head = next(row for row in rows if row[1].strip() == gio_uring.ARCHITECTURES[0])
    row = next(row for row in rows if row[0].strip() == f"`{kernel}`" and len(row) == len(head))
    return int(row[[name.strip() for name in head].index(architecture)])


PROMISED = {
    "the doorbell is one store that is never merged or split": r"ST\S*\.MMIO\.SYS",
    "a command is stored in wide pieces": r"ST\S*\.128",
    "a completion is read at system scope": r"LD\S*\.STRONG\.SYS",
    "results and completions are stored at system scope": r"ST\S*\.64\.STRONG\.SYS",
    "a fence at system scope precedes the doorbell": r"MEMBAR\S*\.SYS",
    "words between threads stay at device scope": r"ATOM\S*\.STRONG\.GPU",
    "waiting threads sleep": r"NANOSLEEP",
}


@pytest.mark.parametrize("architecture", gio_uring.ARCHITECTURES)
def test_the_instructions_are_what_the_comments_say(architecture: str, tmp_path: Path) -> None:
    disassembler = nvdisasm()
    if disassembler is None:
        pytest.skip("no nvdisasm: neither CUDA nor Triton is installed")
    cubin = tmp_path / "gio_uring.cubin"
    cubin.write_bytes(bytes(gio_uring.compile_kernels(architecture).code.code))
    done = subprocess.run([disassembler, "-fun", "3", str(cubin)], capture_output=True, text=True, timeout=60)
    listing = done.stdout if done.returncode == 0 else ""
    if "MMIO" not in listing:
        listing = subprocess.run([disassembler, str(cubin)], capture_output=True, text=True, timeout=60).stdout
    for promise, pattern in PROMISED.items():
        assert re.search(pattern, listing), promise
    assert not re.search(r"\b(LDL|STL)\b", listing), "local memory is used"


def test_without_gdrcopy_the_reason_is_told() -> None:
    if not gdrcopy.unavailable_reason():
        pytest.skip("GDRCopy is installed here")
    with pytest.raises(gdrcopy.EngineError, match="GDRCopy cannot be used"):
        gdrcopy.Mapping(0, 4096)
