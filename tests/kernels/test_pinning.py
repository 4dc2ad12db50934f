"""Memory is registered where the process has a CUDA context, and whatever the driver says, nothing is raised."""

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from tutti_sglang.kernels import pinning


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712


class Driver:
    """What the driver answers, where there is none; the calls that change something are kept."""

    CU_MEMHOSTREGISTER_PORTABLE = 1

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = {"get": (Result.CUDA_SUCCESS, 7), "register": Result.CUDA_SUCCESS, "push": Result.CUDA_SUCCESS}
        self._answers |= answers

    def cuCtxGetCurrent(self) -> Any:
        return self._answers["get"]

    def cuMemHostRegister(self, *arguments: int) -> Any:
        self.calls.append(("register", *arguments))
        return (self._answers["register"],)

    def cuCtxPushCurrent(self, context: int) -> Any:
        self.calls.append(("push", context))
        return (self._answers["push"],)

    def cuMemHostUnregister(self, address: int) -> Any:
        self.calls.append(("unregister", address))
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        self.calls.append(("pop",))
        return (Result.CUDA_SUCCESS, 7)


def test_it_is_registered_for_all_contexts_and_released_in_its_own() -> None:
    driver = Driver()
    pin = pinning.pin(4096, 8192, driver)
    assert pin[:2] == (True, "")
    pin.release()
    assert driver.calls == [("register", 4096, 8192, 1), ("push", 7), ("unregister", 4096), ("pop",)]


@pytest.mark.parametrize("get", [(Result.CUDA_ERROR_NOT_INITIALIZED, 0), (Result.CUDA_SUCCESS, 0)])
def test_a_process_without_a_context_gets_none_and_nothing_is_said(get: Any) -> None:
    driver = Driver(get=get)
    assert pinning.pin(4096, 8192, driver)[:2] == (False, "")
    assert driver.calls == []


def test_what_the_driver_refuses_is_named() -> None:
    driver = Driver(register=Result.CUDA_ERROR_OUT_OF_MEMORY)
    pin = pinning.pin(4096, 8192, driver)
    assert not pin.pinned
    assert "CUDA_ERROR_OUT_OF_MEMORY" in pin.reason
    pin.release()
    assert [call[0] for call in driver.calls] == ["register"]


def test_what_somebody_else_registered_is_left_to_him() -> None:
    driver = Driver(register=Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    pin = pinning.pin(4096, 8192, driver)
    assert pin.pinned
    pin.release()
    assert [call[0] for call in driver.calls] == ["register"]


def test_a_driver_that_has_ended_is_not_asked_to_release() -> None:
    driver = Driver(push=Result.CUDA_ERROR_DEINITIALIZED)
    pinning.pin(4096, 8192, driver).release()
    assert [call[0] for call in driver.calls] == ["register", "push"]


def test_a_driver_that_cannot_be_asked_is_a_reason() -> None:
    assert "cannot be asked" in pinning.pin(4096, 8192, SimpleNamespace()).reason


def test_without_a_device_nothing_is_pinned_and_nothing_is_said() -> None:
    pytest.importorskip("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert pinning.pin(4096, 8192)[:2] == (False, "")
