"""How verbs are told which store: as SGLang is told, or by its directories."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from tutti_sglang.config import Config, load_config, names_storage, read_extra_config, without_device

_UNLIMITED = 1 << 60

Directories = Annotated[
    list[str] | None, typer.Option("--dir", "-d", help="A storage directory; once for each drive of the store.")
]
IndexDir = Annotated[str, typer.Option("--index-dir", help="Where the index is, if not on the first drive.")]
Settings = Annotated[
    str, typer.Option("--config", "-c", help="The extra config that SGLang gets: JSON, or @FILE (.json, .toml, .yaml).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it; it cannot be undone.")]


def config_of(directories: Sequence[str] | None, index_dir: str, settings: str) -> Config:
    """The effective settings: options > extra config > environment > defaults. ConfigError."""
    return load_config(_extra(directories, index_dir, settings)).config


def config_if_any(directories: Sequence[str] | None, index_dir: str, settings: str) -> Config | None:
    """The same, or None where nobody says where the store is. ConfigError."""
    extra = _extra(directories, index_dir, settings)
    return load_config(extra).config if names_storage(extra) else None


def as_visitor(config: Config) -> Config:
    """To open a store beside its servers, alone and without a limit of one's own: whoever opens a store with a smaller
    max_size than it has makes it smaller."""
    return msgspec.structs.replace(without_device(config), max_size=_UNLIMITED, peer=None)


def _extra(directories: Sequence[str] | None, index_dir: str, settings: str) -> dict[str, Any]:
    extra: dict[str, Any] = read_extra_config(settings or None)
    if directories:
        extra["storage_dirs"] = list(directories)
    if index_dir:
        extra["index_dir"] = index_dir
    return extra
