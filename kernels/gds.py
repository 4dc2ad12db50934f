"""GPUDirect Storage on this machine: what cuFile would really do, and why not something better."""

import enum
from pathlib import Path
from typing import Any, NamedTuple

NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")


class Mode(enum.StrEnum):
    """How bytes would go. COMPAT is what cuFile falls back to: through host memory, as the stream mover does itself."""

    NVIDIA_FS = "nvidia-fs"
    P2PDMA = "P2PDMA"
    COMPAT = "compat"
    NONE = "none"


class Found(NamedTuple):
    """The mode, and for people why it is no better one: cuFile's code and what to do about it."""

    mode: Mode
    reason: str


def probe() -> Found:
    """Open cuFile's driver once, and close it again. Raises nothing; cuFile itself may write to stderr."""
    try:
        from cuda.bindings import cufile
    except Exception as error:  # noqa: BLE001 - a library that is missing raises what it likes
        return Found(Mode.NONE, f"cuda.bindings has no cuFile here ({error}): pip install nvidia-cufile")
    try:
        cufile.driver_open()
    except Exception as error:  # noqa: BLE001
        return Found(Mode.NONE, f"cuFile does not start: {_told(error)}")
    try:
        return _mode(cufile)
    except Exception as error:  # noqa: BLE001
        return Found(Mode.NONE, f"cuFile does not say what it does: {_told(error)}")
    finally:
        cufile.driver_close()


def _mode(cufile: Any) -> Found:
    if NVIDIA_FS.exists():
        return Found(Mode.NVIDIA_FS, "")
    if cufile.get_parameter_bool(cufile.BoolConfigParameter.USE_PCIP2PDMA):
        return Found(Mode.P2PDMA, "")
    return Found(
        Mode.COMPAT, "nvidia-fs is not loaded and use_pci_p2pdma is off: modprobe nvidia-fs, or set it in cufile.json"
    )


def _told(error: Exception) -> str:
    """cuFile's words, with its code; what to look at where it is known."""
    text = str(error) or type(error).__name__
    if "5033" in text or "5001" in text:
        return f"{text}; is there a GPU with its driver, and is nvidia-fs loaded (modprobe nvidia-fs)?"
    return text
