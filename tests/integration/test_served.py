"""What a process serves stays what it loaded, whatever happens to the files, until its weights change."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context, restore_context, snapshot_context
from sglang.srt.server_args import ServerArgs

from tutti_sglang.integration import served
from tutti_sglang.integration.cpu_model import write_model
from tutti_sglang.integration.identity import Identity
from tutti_sglang.integration.served import Served, is_repeatable

NO_WAY = {
    "enable_hierarchical_cache": False,
    "enable_unified_cache_external_linker": False,
    "disaggregation_decode_enable_offload_kvcache": False,
}


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
    before = Served()
    before.take()
    write_model(tmp_path, seed=1)
    assert before.identity("m", "").weights != Served().identity("m", "").weights
    write_model(tmp_path, seed=0)
    assert before.identity("m", "") == Served().identity("m", "")
    assert before.identity("m", "mine") == Served().identity("m", "mine") != before.identity("m", "other")


@pytest.mark.parametrize(
    "way",
    [
        {"enable_hierarchical_cache": True},
        {"enable_hierarchical_cache": False, "enable_unified_cache_external_linker": True},
        {"enable_hierarchical_cache": False, "disaggregation_decode_enable_offload_kvcache": True},
    ],
    ids=["host", "direct", "decode offload"],
)
def test_every_way_to_the_store_knows_the_files_of_the_start(way: dict[str, bool], tmp_path: Path) -> None:
    write_model(tmp_path)
    _publish(tmp_path)
    first = Served().identity("m", "")
    model = Served()
    flags = {"memory": SimpleNamespace(**(NO_WAY | way)), "disagg": SimpleNamespace(**(NO_WAY | way))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "get_memory", lambda: flags["memory"])
        patch.setattr(served, "get_disagg", lambda: flags["disagg"])
        model.take()
    write_model(tmp_path, seed=1)
    assert model.identity("m", "") == first


def test_a_model_that_is_attached_is_not_read_again(tmp_path: Path) -> None:
    write_model(tmp_path)
    _publish(tmp_path)
    model = Served()
    first = model.identity("m", "")
    write_model(tmp_path, seed=1)
    assert model.identity("m", "") == first


def test_changed_weights_have_an_identity_that_never_comes_again(tmp_path: Path) -> None:
    write_model(tmp_path)
    _publish(tmp_path)
    seen = set()
    for _ in range(2):
        model = Served()
        model.take()
        seen.add(model.identity("m", ""))
        assert all(map(is_repeatable, seen)) or len(seen) > 1
        for _ in range(2):
            model.change()
            assert model.identity("m", "") == model.identity("m", ""), "until the next update it is one"
            assert not is_repeatable(model.identity("m", ""))
            seen.add(model.identity("m", ""))
    assert len(seen) == 5
    assert len({identity.model for identity in seen}) == 1


def test_weights_from_files_are_known_by_them_if_they_arrived_and_stayed(tmp_path: Path) -> None:
    write_model(tmp_path)
    _publish(tmp_path)
    first = Served().identity("m", "")
    newer = tmp_path / "newer"
    newer.mkdir()

    def updated(seed: int, *, fails: bool = False, overwritten: bool = False, then: bool = False) -> Identity:
        model = Served()
        model.take()
        write_model(newer, seed=seed)
        model.change()
        with model.loading(str(newer), None):
            if overwritten:
                write_model(newer, seed=9)
            if not fails:
                model.succeed(None)
        if then:
            model.succeed("v2")  # a name for the weights, told later
        return model.identity("m", "")

    assert updated(1) == updated(1, then=True) != first
    assert is_repeatable(updated(1))
    assert updated(0) == first, "back to the weights of the start"
    assert updated(2) != updated(1), "other weights over the same path"
    for odd in (updated(1, fails=True), updated(1, overwritten=True), updated(1, fails=True, then=True)):
        assert not is_repeatable(odd)


def test_a_version_is_believed_only_where_the_user_says_so(tmp_path: Path) -> None:
    write_model(tmp_path)
    _publish(tmp_path)

    def updated(version: str | None, *, trust: bool = True, fails: bool = False, again: bool = False) -> Identity:
        model = Served()
        model.take()
        model.change()
        if not fails:
            model.succeed(version)
        if again:
            model.change()
            model.succeed(None)
        return model.identity("m", "", trust_version=trust)

    assert updated("v1") == updated("v1") != updated("v2")
    assert is_repeatable(updated("v1"))
    for odd in (
        updated("v1", trust=False),
        updated(None),
        updated("v1", fails=True),
        updated("v1", again=True),
    ):
        assert not is_repeatable(odd)


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
