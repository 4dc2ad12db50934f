"""The CPU's copies between device and host pools put every byte where SGLang's layouts say, and nowhere else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from tests.integration.host_pools import mha_pool, mla_pool
from tutti_sglang.integration import cpu_transfer

LAYOUTS = [
    ("layer_first", "direct"),
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
]
CASES = [
    *[(mha_pool, layout, io_backend) for layout, io_backend in [*LAYOUTS, ("page_head", "kernel")]],
    *[(mla_pool, layout, io_backend) for layout, io_backend in LAYOUTS],
]
DEVICE_PAGES, HOST_PAGES = [3, 1, 6, 2], [9, 0, 4, 16]


@pytest.fixture(autouse=True, scope="module")
def _platform() -> None:
    cpu_transfer.install()


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def case(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], str, str]:
    return request.param


def _tokens(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def _device_layers(host: Any) -> list[torch.Tensor]:
    """Tensors (token, …): of K then V for each layer, or of the latent."""
    return list(
        host.device_kv_buffers
        if isinstance(host, MLATokenToKVPoolHost)
        else host.device_k_buffers + host.device_v_buffers
    )


def _in_host(host: Any, tensor: int, token: int) -> torch.Tensor:
    """Where SGLang's layout puts a token of the device tensor of that number, by mha.py:305 and mla.py:308."""
    buffer = host.kv_buffer
    layer = tensor % host.layer_num
    if isinstance(host, MHATokenToKVPoolHost):
        buffer = buffer[tensor // host.layer_num]
    page, place = divmod(token, host.page_size)
    match host.layout:
        case "layer_first":
            return buffer[layer, token]
        case "page_first":
            return buffer[token, layer]
        case "page_first_direct":
            return buffer[page, layer, place]
        case "page_head":
            return buffer[page, :, place, layer]
    raise AssertionError(host.layout)


def _each_token(host: Any, pages: list[int]) -> Iterator[tuple[int, int]]:
    for tensor in range(len(_device_layers(host))):
        for token in _tokens(pages, host.page_size).tolist():
            yield tensor, token


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_backup_and_load_move_exactly_the_named_pages(
    case: tuple[Callable[..., Any], str, str], page_size: int
) -> None:
    make, layout, io_backend = case
    host = make(layout, page_size)
    layers = _device_layers(host)
    generator = torch.Generator().manual_seed(page_size)
    for tensor in layers:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    host.kv_buffer.fill_(7)

    device, rows = _tokens(DEVICE_PAGES, page_size), _tokens(HOST_PAGES, page_size)
    host.backup_from_device_all_layer(None, rows, device, io_backend)
    untouched = [page for page in range(host.page_num) if page not in HOST_PAGES]
    pairs = dict(zip(rows.tolist(), device.tolist(), strict=True))
    assert all(torch.equal(_in_host(host, t, row), layers[t][pairs[row]]) for t, row in _each_token(host, HOST_PAGES))
    assert all((_in_host(host, t, row) == 7).all() for t, row in _each_token(host, untouched))

    before = [tensor.clone() for tensor in layers]
    for tensor in layers:
        tensor.fill_(3)
    back = _tokens([page + 1 for page in DEVICE_PAGES], page_size)
    for layer in range(host.layer_num):
        host.load_to_device_per_layer(None, rows, back, layer, io_backend)
    for tensor, old in zip(layers, before, strict=True):
        expected = torch.full_like(tensor, 3)
        expected[back] = old[device]
        assert torch.equal(tensor, expected)


def test_one_layer_is_loaded_without_the_others(case: tuple[Callable[..., Any], str, str]) -> None:
    make, layout, io_backend = case
    host = make(layout)
    host.kv_buffer.fill_(7)
    tokens = _tokens([1], host.page_size)
    for tensor in _device_layers(host):
        tensor.fill_(3)
    host.load_to_device_per_layer(None, tokens, tokens, 1, io_backend)
    for number, tensor in enumerate(_device_layers(host)):
        assert (tensor[tokens] == (7 if number % host.layer_num == 1 else 3)).all()


def test_nothing_to_move_moves_nothing(case: tuple[Callable[..., Any], str, str]) -> None:
    make, layout, io_backend = case
    host = make(layout)
    host.kv_buffer.fill_(7)
    none = torch.empty(0, dtype=torch.int64)
    host.backup_from_device_all_layer(None, none, none, io_backend)
    host.load_to_device_per_layer(None, none, none, 0, io_backend)
    assert (host.kv_buffer == 7).all()


def test_host_memory_is_never_pinned() -> None:
    host = mha_pool("layer_first")
    host.pin_memory = True
    assert not host.pin_memory
    assert len(host.get_dummy_flat_data_page()) * 2 == host.get_size_per_token() * host.page_size


def test_what_is_to_be_pinned_is_made_and_stays_as_it_is() -> None:
    cpu_transfer.install()  # again
    mask = torch.tensor([True, False], pin_memory=True)
    assert mask.pin_memory() is mask
    assert torch.empty(3, dtype=torch.int64, device="cpu", pin_memory=True).dtype == torch.int64
