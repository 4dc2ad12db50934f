"""What the probe of GPUDirect Storage says, by the real libcufile as it is here."""

import pytest

from tutti_sglang.kernels import gds


def test_without_a_driver_the_reason_has_cufiles_code_and_what_to_do() -> None:
    pytest.importorskip("cuda.bindings.cufile", reason="cuda-python is not installed")
    found = gds.probe()
    if found.mode is not gds.Mode.NONE:
        pytest.skip(f"GPUDirect Storage works here: {found.mode}")
    assert "5033" in found.reason
    assert "nvidia-fs" in found.reason


def test_the_probe_may_be_made_again() -> None:
    assert gds.probe() == gds.probe()
