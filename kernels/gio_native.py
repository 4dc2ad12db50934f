"""Builds and finds the native half of gio: the software controller and the CPU twin of the kernel (kernels/gio/)."""

import ctypes
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "gio"
SOURCES = (FOLDER / "controller.cpp", FOLDER / "controller_io.cpp", FOLDER / "library.cpp")

_PATTERN = "_gio*.so"
_CUDA = Path("/usr/local/cuda")
_u32, _u64, _i32, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_void_p

# kernels/gio/library.cpp: name → (result, arguments).
_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "gio_field": (ctypes.c_char_p, (_u32, ctypes.POINTER(_u64), ctypes.POINTER(_u64))),
    "gio_errno_of": (_i32, (_u32,)),
    "gio_controller_new": (_pointer, (_pointer,)),
    "gio_controller_delete": (None, (_pointer,)),
    "gio_controller_add_queue": (None, (_pointer, _u64)),
    "gio_controller_map": (None, (_pointer, _pointer)),
    "gio_controller_attach": (_i32, (_pointer, _u64, _i32)),
    "gio_controller_detach": (_i32, (_pointer, _u64, _u64)),
    "gio_controller_set_faults": (None, (_pointer, _pointer)),
    "gio_controller_set_bad_blocks": (None, (_pointer, _pointer, _u32)),
    "gio_controller_start": (None, (_pointer,)),
    "gio_controller_wake": (None, (_pointer,)),
    "gio_controller_stop": (_i32, (_pointer, _u64)),
    "gio_controller_release_dropped": (_u32, (_pointer,)),
    "gio_controller_counts": (None, (_pointer, _pointer)),
    "gio_controller_endpoint": (_pointer, (_pointer,)),
    "gio_relay_new": (_pointer, (_pointer, _u32, _u64, _u64)),
    "gio_relay_delete": (None, (_pointer,)),
    "gio_relay_wake": (None, (_pointer,)),
    "gio_relay_rings": (_u64, (_pointer,)),
    "gio_relay_endpoint": (_pointer, (_pointer,)),
    "gio_bell_new": (_pointer, ()),
    "gio_bell_delete": (None, (_pointer,)),
    "gio_bell_ring": (None, (_pointer,)),
    "gio_bell_count": (_u64, (_pointer,)),
    "gio_bell_wait": (_u64, (_pointer, _u64, _u64)),
    "gio_twin_new": (_pointer, (_u64, _pointer, ctypes.POINTER(_pointer), _u32, _pointer)),
    "gio_twin_delete": (None, (_pointer,)),
    "gio_twin_issue": (None, (_pointer, _u32, _u32, _u64)),
    "gio_twin_cancel": (None, (_pointer, _u32)),
    "gio_twin_refuse": (None, (_pointer, _u64, _u64)),
    "gio_twin_stop": (_i32, (_pointer, _u64)),
    "gio_run_sub_io": (None, (_u64, _u32, _u32, _u32)),
    "gio_reap": (_u32, (_u64, _u64)),
    "gio_abort_all": (None, (_u64, _u64)),
    "gio_claim": (_i32, (_u64, _u32)),
    "gio_free": (None, (_u64, _u32)),
    "gio_submit": (None, (_u64, _pointer)),
    "gio_announce": (None, (_u64,)),
    "gio_completed": (_u64, (_u64,)),
}


def cccl() -> Path | None:
    """The headers of libcu++ (wheel nvidia-cuda-cccl, or CUDA's own), whose atomics both targets use; None: absent."""
    wheels = (found for folder in map(Path, sys.path) for found in folder.glob("nvidia/*/include/cccl"))
    for found in (*wheels, _CUDA / "include/cccl", _CUDA / "include"):
        if (found / "cuda/atomic").exists():
            return found
    return None


def compiler() -> str | None:
    """A C++20 compiler, or None."""
    return shutil.which("g++") or shutil.which("c++")


def compile_cpp(output: Path, sources: tuple[Path, ...], *flags: str, headers: Path | None = None) -> None:
    """Compile and link with the protocol headers, which take their atomics from libcu++ in `headers`, or from the
    standard library. Raises RuntimeError with the compiler's words."""
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler: install g++ 12 or newer")
    include = [f"-I{FOLDER}", *(["-isystem", str(headers)] if headers else [])]
    arguments = [
        command,
        "-std=c++20",
        "-Wall",
        "-Wextra",
        *flags,
        *include,
        "-o",
        str(output),
        *map(str, sources),
        "-pthread",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}\n{done.stderr}")


def build(folder: Path) -> Path:
    """Compile the library into `folder`, for a source tree that nobody installed. Returns its path."""
    output = folder / "_gio.so"
    compile_cpp(output, SOURCES, "-O2", "-fPIC", "-shared", headers=cccl())
    return output


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, its functions typed. Raises OSError."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _installed() -> Path | None:
    return next(iter(sorted(Path(__file__).parent.glob(_PATTERN))), None)


@cache
def library() -> ctypes.CDLL | None:
    """The library that was built at installation, loaded once; None: there was no C++20 compiler."""
    found = _installed()
    return load(found) if found else None


def current(folder: Path) -> ctypes.CDLL:
    """For tests and figures: the library of the sources as they are, the installed one or built into `folder`. Raises
    RuntimeError without a compiler."""
    found = _installed()
    newest = max(path.stat().st_mtime for path in FOLDER.iterdir())
    return load(found if found and found.stat().st_mtime > newest else build(folder))
