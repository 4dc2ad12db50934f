"""Host memory that a CUDA device reads and writes itself: registered where this process uses a device, and only there.

A process without a CUDA context (tools, a store on a machine without a GPU) gets none by this: making one would take
time and memory of the device for nothing.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_SUCCESS, _ALREADY_REGISTERED = 0, 712  # CUresult


class Pin(NamedTuple):
    """`pinned`: memory is registered until `release`, which must come before it is unmapped; `reason`: why it is not
    although this process uses a device."""

    pinned: bool
    reason: str
    release: Callable[[], None]


def _nothing() -> None:
    pass


def pin(address: int, size: int, driver: Any = None) -> Pin:
    """Register `size` bytes at `address`, both multiples of 4 KiB, for all contexts of the process. Raises nothing.
    `driver`: instead of cuda.bindings' own."""
    driver = driver or _driver()
    if driver is None:
        return Pin(False, "", _nothing)
    try:
        status, context = driver.cuCtxGetCurrent()
        if int(status) != _SUCCESS or not int(context):
            return Pin(False, "", _nothing)
        (status,) = driver.cuMemHostRegister(address, size, driver.CU_MEMHOSTREGISTER_PORTABLE)
    except Exception as error:  # noqa: BLE001 - bindings without a library raise what they like
        return Pin(False, f"the CUDA driver cannot be asked: {error}", _nothing)
    if int(status) == _ALREADY_REGISTERED:  # by somebody else, whose it is to release
        return Pin(True, "", _nothing)
    if int(status) != _SUCCESS:
        return Pin(False, f"cuMemHostRegister failed: {status.name}", _nothing)
    return Pin(True, "", lambda: _release(driver, context, address))


def _driver() -> Any:
    """cuda.bindings' driver API, where this process may have a context: then torch, or what else made it, is loaded."""
    if not {"torch", "cuda", "cupy"} & sys.modules.keys():
        return None
    try:
        from cuda.bindings import driver

        driver.cuCtxGetCurrent()
    except Exception:  # noqa: BLE001 - no cuda-python, or no libcuda: there is no device
        return None
    return driver


def _release(driver: Any, context: Any, address: int) -> None:
    """In its own context, whichever thread lets the memory go: that thread may have none."""
    (status,) = driver.cuCtxPushCurrent(context)
    if int(status) == _SUCCESS:  # else the driver has ended, and every registration with it
        driver.cuMemHostUnregister(address)
        driver.cuCtxPopCurrent()
