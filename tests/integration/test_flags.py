"""What SGLang resolves when the tier is named on its command line: defaults, refusals and messages."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, prepare_server_args

from tutti_sglang.errors import ConfigError
from tutti_sglang.integration import flags
from tutti_sglang.integration.cpu_model import built_in_model

DYNAMIC = {
    "backend_name": "tutti",
    "module_path": "tutti_sglang.integration.hicache",
    "class_name": flags.CLASS_NAME,
}


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    flags.install()
    HookRegistry.apply_hooks()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(built_in_model(tmp_path_factory.mktemp("models")))


class Launch:
    """A command line without the server behind it."""

    def __init__(self, model: str, directory: Path) -> None:
        self.model = model
        self.extra: dict[str, Any] = {
            "storage_dirs": [str(directory)],
            "max_size": "8MiB",
            "segment_size": "2MiB",
            "min_free_space": 1,
        }

    def args(self, *more: str, backend: str = "tutti") -> ServerArgs:
        return prepare_server_args(
            [
                *("--model-path", self.model, "--device", "cpu", "--log-level", "info"),
                *("--enable-hierarchical-cache", "--hicache-storage-backend", backend),
                *("--hicache-storage-backend-extra-config", json.dumps(self.extra)),
                *more,
            ]
        )

    def resolve(self, *more: str, backend: str = "tutti") -> Any:
        args = self.args(*more, backend=backend)
        args.resolve_once()
        return resolving_view(args)


@pytest.fixture
def launch(model: str, tmp_path: Path) -> Launch:
    return Launch(model, tmp_path / "store")


def _threshold(cfg: Any) -> int:
    return int(json.loads(cfg.hicache_storage_backend_extra_config)["prefetch_threshold"])


def test_defaults_suit_a_disk_and_are_logged(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    cfg = launch.resolve()
    assert cfg.page_size == 64
    assert (cfg.hicache_mem_layout, cfg.hicache_io_backend) == ("page_first_direct", "direct")
    assert _threshold(cfg) == 64
    logged = capfd.readouterr().err
    for said in ("page size 64", "page_first_direct", "prefetch_threshold=64"):
        assert said in logged


def test_what_the_user_named_stays(launch: Launch) -> None:
    launch.extra["prefetch_threshold"] = 512
    cfg = launch.resolve("--page-size", "32", "--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel")
    assert (cfg.page_size, cfg.hicache_mem_layout, cfg.hicache_io_backend) == (32, "page_first", "kernel")
    assert _threshold(cfg) == 512
    assert launch.resolve("--hicache-mem-layout=layer_first").hicache_mem_layout == "layer_first"


def test_a_small_page_is_served_with_the_cost_named(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.resolve("--page-size", "1").page_size == 1
    logged = capfd.readouterr().err
    assert "4KiB" in logged
    assert "--page-size 64" in logged
    launch.resolve("--page-size", "16")
    assert "4KiB" not in capfd.readouterr().err


def test_a_model_that_needs_single_tokens_keeps_them(launch: Launch) -> None:
    args = launch.args()
    flags.declare_resolution(
        args, "test", uses_mamba_radix_cache=True, mamba_radix_cache_strategy="no_buffer", page_size=None
    )
    flags.choose_page_size(args, lambda _: None)
    assert resolving_view(args).page_size is None


def test_the_dynamic_route_gets_the_same_defaults(launch: Launch, tmp_path: Path) -> None:
    launch.extra |= DYNAMIC
    assert launch.resolve(backend="dynamic").page_size == 64
    file = tmp_path / "extra.json"
    file.write_text(json.dumps(launch.extra))
    cfg = launch.resolve("--hicache-storage-backend-extra-config", f"@{file}", backend="dynamic")
    assert cfg.page_size == 64
    assert json.loads(cfg.hicache_storage_backend_extra_config)["class_name"] == flags.CLASS_NAME


def test_other_backends_are_left_alone(launch: Launch) -> None:
    cfg = launch.resolve("--hicache-storage-backend-extra-config", "{}", backend="file")
    assert (cfg.page_size, cfg.hicache_mem_layout, cfg.hicache_storage_backend_extra_config) == (1, "page_first", "{}")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"storage_dir": "/mnt/x"}, "Unknown setting 'storage_dir'.*storage_dirs"),
        ({"max_size": "many"}, "max_size.*'many' is not a size"),
        ({"storage_dirs": ["relative"]}, "'relative' is not an absolute path"),
        ({"storage_dirs": []}, "storage_dirs is not set"),
        ({"storage_dirs": ["/proc"]}, "/proc.*empty or new directory"),
        ({"storage_dirs": ["/dev/null"]}, "/dev/null is not a directory"),
        ({"min_free_space": "900TiB"}, "No room for even one segment.*min_free_space"),
    ],
)
def test_a_bad_setting_ends_the_launch_with_one_line(launch: Launch, extra: dict[str, Any], message: str) -> None:
    launch.extra |= extra
    with pytest.raises(SystemExit, match=f"^tutti: .*{message}") as caught:
        launch.resolve()
    assert caught.value.code not in (None, 0)  # Python prints the text and exits with 1


def test_a_python_caller_gets_the_exception(launch: Launch) -> None:
    extra = json.dumps({"storage_dirs": ["relative"]})
    keywords = {"model_path": launch.model, "device": "cpu", "enable_hierarchical_cache": True}
    args = ServerArgs(**keywords, hicache_storage_backend="tutti", hicache_storage_backend_extra_config=extra)
    with pytest.raises(ConfigError, match="not an absolute path"):
        args.resolve_once()


def test_the_direct_path_starts_the_external_linker(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    launch.extra["path"] = "direct"
    cfg = launch.resolve()
    assert cfg.enable_unified_cache_external_linker
    assert cfg.unified_cache_external_linker_backend == "tutti"
    assert cfg.unified_cache_external_linker_config == launch.extra
    assert not cfg.enable_hierarchical_cache
    assert cfg.hicache_storage_backend is None
    assert cfg.page_size == 64
    assert "--enable-unified-cache-external-linker" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--hicache-write-policy", "write_back"),
        ("--hicache-write-policy", "write_through"),  # the default, but named
        ("--hicache-storage-prefetch-policy", "wait_complete"),
        ("--hicache-host-memory-mode", "buffer_only"),
        ("--hicache-ratio", "3"),
        ("--hicache-mem-layout", "page_first"),
        ("--disaggregation-decode-enable-offload-kvcache",),
    ],
    ids=lambda flags: " ".join(flags),
)
def test_flags_of_a_host_tier_are_refused_by_name_on_the_direct_path(
    launch: Launch, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.extra["path"] = "direct"
    monkeypatch.setattr("sys.argv", ["launch_server", *flags])
    with pytest.raises(SystemExit, match=f"^tutti: .*{flags[0]}.*direct path"):
        launch.resolve(*flags)


def _linker_flags(backend: str, config: dict[str, Any]) -> tuple[str, ...]:
    flags = ("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", backend)
    return (*flags, "--unified-cache-external-linker-config", json.dumps(config))


def test_the_linker_may_be_named_outright(launch: Launch) -> None:
    by_name = {"linker": "TuttiLinker", "linker_module_path": "tutti_sglang.integration.linker"}
    dynamic = {**by_name, "linker_extra_config": launch.extra}
    for backend, config in (("tutti", launch.extra), ("dynamic", dynamic)):
        args = prepare_server_args(["--model-path", launch.model, "--device", "cpu", *_linker_flags(backend, config)])
        args.resolve_once()
        assert resolving_view(args).page_size == 64


def test_a_linker_with_settings_that_cannot_work_ends_the_launch(launch: Launch) -> None:
    for config, message in (
        ({"storage_dirs": ["relative"]}, "not an absolute path"),
        ({"path": "host"}, "no external"),
    ):
        arguments = ["--model-path", launch.model, "--device", "cpu", *_linker_flags("tutti", launch.extra | config)]
        with pytest.raises(SystemExit, match=message):
            prepare_server_args(arguments).resolve_once()


def test_the_host_paths_dynamic_backend_is_not_the_direct_path(launch: Launch) -> None:
    launch.extra |= DYNAMIC | {"path": "direct"}
    with pytest.raises(SystemExit, match="external-linker"):
        launch.resolve(backend="dynamic")


def test_a_file_of_settings_is_checked_too(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "extra.toml"
    file.write_text('storage_dirs = ["/mnt/a"]\nsegment_sise = "64MiB"\n')
    with pytest.raises(SystemExit, match=r"segment_sise.*segment_size"):
        launch.resolve("--hicache-storage-backend-extra-config", f"@{file}")


def test_the_fallback_offers_the_choice_in_the_parser(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    import typing

    from sglang.srt.arg_groups.arg_utils import _unwrap_annotated

    hints = typing.get_type_hints(ServerArgs, include_extras=True)
    for flag in flags.FLAGS:
        choices = _unwrap_annotated(hints[flag])[1].choices
        monkeypatch.setattr(flags, "_offer_choice", lambda: None)
        choices.remove(flags.NAME)
    try:
        assert launch.args().hicache_storage_backend == "tutti"
    finally:
        monkeypatch.undo()
        flags._offer_choice()


def test_the_tier_without_the_host_cache_is_pointed_out(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = json.dumps({"storage_dirs": [str(tmp_path)]})
    args = ServerArgs(
        model_path=model, device="cpu", hicache_storage_backend="tutti", hicache_storage_backend_extra_config=extra
    )
    with caplog.at_level(logging.WARNING):
        flags.check_settings(args, lambda _: None)
    assert "--enable-hierarchical-cache" in caplog.text
