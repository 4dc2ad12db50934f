"""Gather and scatter between paged pools and Tensor-Stripe order. The kernel runs here in Triton's interpreter, which
must be chosen before Triton is imported: a process of its own."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import pack_suite as suite
from tutti_sglang import checksum
from tutti_sglang.kernels import pack
from tutti_sglang.kernels.pack import Paged, TorchPack, TritonPack, hnd, nhd

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@st.composite
def pages_of_tensors(draw: Any) -> list[tuple[Paged, int]]:
    """Tensors of one pool with base 0, each with the bytes of its buffer; every level may have gaps."""
    count = draw(st.integers(1, 3))
    pages = draw(st.integers(1, 6))
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    result = []
    for _ in range(count):
        width = unit * draw(st.integers(1, 40))
        parts = draw(st.integers(1, 4))
        rows = draw(st.integers(1, 33))
        part_stride = width + unit * draw(st.sampled_from([0, 0, 3]))
        row_stride = parts * part_stride + unit * draw(st.sampled_from([0, 0, 5]))
        if draw(st.booleans()):  # heads outside, tokens inside
            row_stride, part_stride = part_stride, rows * part_stride
        page_stride = max(rows * row_stride, parts * part_stride) + unit * draw(st.sampled_from([0, 7]))
        result.append((Paged(0, page_stride, rows, row_stride, parts, part_stride, width), pages * page_stride))
    return result


def test_the_kernel_agrees_with_its_twin_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}", "-k", "interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the process of the first test, in Triton's interpreter"
)


@interpreted
@settings(max_examples=20, deadline=None)
@given(pages_of_tensors(), st.integers(0, 2**31))
def test_interpreted_gather(shapes: list[tuple[Paged, int]], seed: int) -> None:
    suite.check_gather(TritonPack, shapes, seed, CPU)


@interpreted
@settings(max_examples=20, deadline=None)
@given(pages_of_tensors(), st.integers(0, 2**31))
def test_interpreted_scatter(shapes: list[tuple[Paged, int]], seed: int) -> None:
    suite.check_scatter(TritonPack, shapes, seed, CPU)


@settings(max_examples=40, deadline=None)
@given(pages_of_tensors(), st.integers(0, 2**31))
def test_the_twin_gathers_scatters_and_sums_like_the_reference(shapes: list[tuple[Paged, int]], seed: int) -> None:
    suite.check_gather(TorchPack, shapes, seed, CPU)
    suite.check_scatter(TorchPack, shapes, seed, CPU)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_pools_in_nhd_and_hnd_order_exchange_pages(dtype: torch.dtype) -> None:
    pages, size, heads, dim = 5, 4, 3, 8
    tokens = torch.randint(0, 255, (pages * size, heads, dim)).to(dtype)
    swapped = tokens.view(pages, size, heads, dim).transpose(1, 2).contiguous()
    chosen = torch.tensor([4, 0])
    one, two = [nhd(tokens, size)], [hnd(swapped)]
    flat, places = suite.dense_rows(one, 2, CPU)
    sums = TorchPack(one, CPU).gather(chosen, places)
    expected = tokens.view(pages, size, heads, dim)[chosen]
    swapped[chosen] = 0
    assert torch.equal(TorchPack(two, CPU).scatter(chosen, places), sums)
    assert torch.equal(swapped.transpose(1, 2)[chosen], expected)
    assert flat.any()


def test_a_contiguous_page_is_one_row() -> None:
    assert nhd(torch.zeros((32, 2, 8)), 16).flat()[2:6] == (1, 0, 1, 0)
    strided = torch.zeros((32, 24))[:, :16]
    assert nhd(strided, 16).rows == 16


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("word", [1, 8])
def test_the_kernel_compiles_for_each_generation_and_spills_nothing(arch: int, word: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = inspect.getfullargspec(pack._move_block.fn).args
    signature = {name: "constexpr" for name in names if name.isupper()}
    signature |= {"count": "i32", "blocks": "i32", "dense_stride": "i32"} | dict.fromkeys(
        ["table", "pages", "dense", "keys", "sums"], "*i64"
    )
    chosen = {"SUMMED": True, "TO_POOL": True, "CONTIGUOUS": False, "BYTES": word, "ELEMENT": pack._ELEMENTS[word]}
    chosen |= {"FIELDS": pack._FIELDS, "WORDS": checksum.WORDS}
    built = compile(ASTSource(pack._move_block, signature, chosen), target=GPUTarget("cuda", arch, 32))
    assert built.asm["cubin"]
    assert "st.local" not in built.asm["ptx"]
