"""What a process serves stays what it loaded, whatever happens to the files, until its weights change."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context, restore_context, snapshot_context
from sglang.srt.server_args import ServerArgs

from tutti_sglang.integration.cpu_model import write_model
from tutti_sglang.integration.served import Served, is_repeatable


@pytest.fixture(autouse=True)
def _context() -> Iterator[None]:
    before = snapshot_context()
    yield
    restore_context(before)


def _publish(model: Path, **changed: object) -> None:
    arguments = {"device": "cpu", "enable_hierarchical_cache": True, "hicache_io_backend": "direct", **changed}
    server_args = ServerArgs(model_path=str(model), **arguments)
    server_args.resolve_once()
    check_lora_server_args(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0))


def test_files_that_are_overwritten_later_do_not_count(tmp_path: Path) -> None:
    write_model(tmp_path)
    _publish(tmp_path)
    before, late = Served(), Served()
    before.take()
    write_model(tmp_path, seed=1)
    assert before.identity("m", "").weights != late.identity("m", "").weights
    write_model(tmp_path, seed=0)
    assert before.identity("m", "") == late.identity("m", "")
    assert before.identity("m", "mine") == late.identity("m", "mine") != before.identity("m", "other")


def test_changed_weights_have_an_identity_that_never_comes_again(tmp_path: Path) -> None:
    write_model(tmp_path)
    _publish(tmp_path)
    model = Served()
    model.take()
    first = model.identity("m", "")
    assert is_repeatable(first)
    model.change()
    changed = [model.identity("m", "") for _ in range(2)]
    assert len({first, *changed}) == 3
    assert not any(map(is_repeatable, changed))
    assert changed[0].model == first.model


def test_adapters_count_by_their_content(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    adapter.mkdir()
    write_model(model)
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 8}')
    (adapter / "adapter_model.bin").write_bytes(b"one")
    seen = set()
    for change in ("", "weights", "scale"):
        if change == "weights":
            (adapter / "adapter_model.bin").write_bytes(b"two")
        if change == "scale":
            (adapter / "adapter_config.json").write_text('{"lora_alpha": 16}')
        paths = [f"a={adapter}"]
        _publish(model, enable_lora=True, lora_paths=paths, max_lora_rank=8, lora_target_modules=["all"])
        seen.add(Served().identity("m", "").model)
    _publish(model)
    seen.add(Served().identity("m", "").model)
    assert len(seen) == 4


def test_without_a_configuration_the_names_stand_in() -> None:
    reset_context()
    model = Served()
    assert model.identity("m", "") != model.identity("n", "")
    assert model.identity("m", "a") != model.identity("m", "b")
