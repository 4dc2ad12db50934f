"""Settings: extra config (JSON or @file) > SGLANG_HICACHE_TUTTI_* > defaults. The only reader of the environment."""

import difflib
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tutti_sglang.errors import ConfigError
from tutti_sglang.geometry import ALIGNMENT, Stripe
from tutti_sglang.units import format_size, parse_size

ENV_PREFIX = "SGLANG_HICACHE_TUTTI_"

# HCC.parse_storage_backend_extra_config and HiCacheController._generate_storage_config pop most of these; the
# decode-offload manager and the `dynamic` route leave them in.
SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
_RAW = re.compile(r"vfio:(?P<address>[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])(?:/(?P<nsid>[1-9]\d*))?")
_SIZES = frozenset(
    ["max_size", "min_free_space", "segment_size", "max_io", "staging_size", "daily_write_budget", "preload"]
)


class PeerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fleet that a store shares objects with. Sizes in bytes, times in seconds."""

    kind: Literal["mooncake"]
    master: str
    metadata: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    host: str = ""
    publish: Literal["none", "second", "all"] = "second"
    keep: bool = True
    memory: int = 256 << 20
    offer: int = 0
    timeout: float = 2.0

    def __post_init__(self) -> None:
        if not self.master:
            raise ConfigError("peer.master is empty", "Give the master's address, as in 10.0.0.1:50051")
        if self.memory < 1 << 20 or self.offer < 0 or not 0 < self.timeout <= 5:
            raise ConfigError("peer: memory must be at least 1MiB, offer not negative, timeout within 5 seconds")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The effective settings of one store in one process. Sizes in bytes, times in seconds."""

    storage_dirs: tuple[str, ...]
    path: Literal["host", "direct"] = "host"
    index_dir: str = ""
    max_size: int = 0
    min_free_space: int = 4 << 30
    segment_size: int = 256 << 20
    stripe: Stripe = Stripe.TENSOR
    engine: Literal["auto", "uring", "threads", "gds", "gio"] = "auto"
    queue_depth: int = 64
    max_io: int = 1 << 20
    direct_io: Literal["auto", "required", "off"] = "auto"
    fsync: Literal["none", "batch", "each"] = "none"
    checksum: Literal["on", "off"] = "on"
    staging_size: int = 512 << 20
    write_admission: Literal["all", "second"] = "all"
    daily_write_budget: int = 0
    eviction: Literal["clock"] = "clock"
    low_watermark: float = 0.97
    high_watermark: float = 0.99
    grace_seconds: float = 60.0
    break_even: Literal["on", "off"] = "on"
    windows: Literal["on", "off"] = "on"
    preload: int = 4 << 30
    model_id: str = ""
    trust_weight_version: bool = False
    doorbell: Literal["gpu", "relay"] = "gpu"
    overwrite: tuple[str, ...] = ()
    peer: PeerConfig | None = None

    def __post_init__(self) -> None:
        _check_directories(self.storage_dirs, self.index_dir)
        _check_raw_drives(self)
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError("Need 0 < low_watermark <= high_watermark <= 1")
        if self.segment_size < 1 << 20 or self.segment_size % ALIGNMENT:
            raise ConfigError(
                f"segment_size = {format_size(self.segment_size)} is too small or odd",
                "Give a multiple of 4KiB of at least 1MiB, as in 256MiB",
            )
        if 0 < self.max_size < self.segment_size:
            raise ConfigError(
                f"max_size = {format_size(self.max_size)} holds no segment of {format_size(self.segment_size)}",
                "Raise max_size or lower segment_size",
            )
        if 0 < self.preload < 1 << 20:
            raise ConfigError(
                f"preload = {self.preload} is too small", "Give at least 1MiB, or 0 to read nothing ahead"
            )
        if self.max_io < ALIGNMENT or self.max_io % ALIGNMENT:
            raise ConfigError(f"max_io = {self.max_io} is not a multiple of 4KiB")
        if self.queue_depth < 1 or self.grace_seconds <= 0 or self.staging_size < 1 << 20:
            raise ConfigError("queue_depth and grace_seconds must be positive, staging_size at least 1MiB")

    @property
    def index_path(self) -> Path:
        """Where the index lives: `index_dir`, by default the first drive."""
        return Path(self.index_dir or self.storage_dirs[0])


def without_device(config: Config) -> Config:
    """For a process that moves nothing to or from a device, and may have none."""
    return msgspec.structs.replace(config, engine="auto") if config.engine == "gds" else config


class RawName(NamedTuple):
    """Where a raw drive is: a PCI address and a namespace, 0 = the only one."""

    address: str
    nsid: int


def raw_name(text: str) -> RawName | None:
    """Of `vfio:0000:01:00.0` or `vfio:0000:01:00.0/2` among `storage_dirs`; None for a directory."""
    found = _RAW.fullmatch(text)
    return RawName(found["address"].lower(), int(found["nsid"] or 0)) if found else None


class LoadedConfig(msgspec.Struct, frozen=True):
    """Settings and, for each, where its value comes from: `extra config`, an environment variable or `default`."""

    config: Config
    origin: dict[str, str]

    def describe(self) -> str:
        """One line for the log: what was set, by whom; defaults are left out."""
        parts = []
        for name, origin in self.origin.items():
            if origin != "default":
                value = getattr(self.config, name)
                shown = format_size(value) if name in _SIZES else value
                parts.append(f"{name}={shown} ({origin})")
        return ", ".join(parts)


def read_extra_config(text: str | None) -> dict[str, Any]:
    """The object behind SGLang's `--hicache-storage-backend-extra-config`: JSON, or `@file` (.json, .toml, .yaml)."""
    if not text:
        return {}
    try:
        # The command line holds bytes that are not UTF-8 as lone surrogates.
        data = text.encode("utf-8", "surrogateescape")
        value = _read_file(Path(text[1:])) if text.startswith("@") else msgspec.json.decode(data)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise ConfigError(f"The extra config {text!r} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"The extra config must be an object, not {type(value).__name__}")
    return value


def load_config(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None, *, rank: int = 0) -> LoadedConfig:
    """Merge, check and freeze. `rank` fills `{rank}` in directories. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    fields = Config.__struct_fields__
    given = {key: value for key, value in extra.items() if key not in SGLANG_KEYS}
    for key in given:
        _check_known(key, fields)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name in environ:
        if name.startswith(ENV_PREFIX):
            _check_known(name.removeprefix(ENV_PREFIX).lower(), fields, shown=name)
    for name in fields:
        variable = ENV_PREFIX + name.upper()
        if name in given:
            values[name], origin[name] = given[name], "extra config"
            if variable in environ:
                origin[name] += f", overrides {variable}"
        elif variable in environ:
            values[name], origin[name] = environ[variable], variable
        else:
            origin[name] = "default"
    return LoadedConfig(_convert(values, rank), origin)


def names_storage(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> bool:
    """Whether the settings say where the store is."""
    environ = os.environ if environ is None else environ
    return "storage_dirs" in extra or ENV_PREFIX + "STORAGE_DIRS" in environ


def _read_file(path: Path) -> Any:
    data = path.read_bytes()
    match path.suffix.lower():
        case ".toml":
            return tomllib.loads(data.decode())
        case ".yaml" | ".yml":
            return msgspec.yaml.decode(data)
        case _:
            return msgspec.json.decode(data)


def _check_known(key: str, fields: tuple[str, ...], shown: str = "") -> None:
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known settings: {', '.join(fields)}"
        raise ConfigError(f"Unknown setting {shown or key!r}", hint)


def _convert(values: dict[str, Any], rank: int) -> Config:
    values = values | {"peer": _peer(values.get("peer"))}
    for name in _SIZES & values.keys():
        try:
            values[name] = parse_size(values[name])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    directories = values.get("storage_dirs")
    if not directories:
        raise ConfigError(
            "storage_dirs is not set: the tier does not know where to keep the KV cache",
            "Name a directory on each NVMe drive, as in "
            '--hicache-storage-backend-extra-config \'{"storage_dirs": ["/mnt/nvme0/tutti"]}\'',
        )
    if isinstance(directories, str):
        directories = directories.split(",")
    if not isinstance(directories, list | tuple):
        raise ConfigError(f"storage_dirs = {directories!r} is not a list of directories")
    if isinstance(values.get("overwrite"), str):
        values["overwrite"] = tuple(filter(None, values["overwrite"].split(",")))
    values["storage_dirs"] = tuple(_expand(each, rank) for each in directories)
    if values.get("index_dir"):
        values["index_dir"] = _expand(values["index_dir"], rank)
    try:
        return msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"Bad setting: {error}") from error


def _peer(value: Any) -> dict[str, Any] | None:
    """An object, or in the environment its JSON."""
    if value is None:
        return None
    try:
        peer = msgspec.json.decode(value) if isinstance(value, str) else value
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        raise ConfigError(f"peer: {value!r} is no JSON: {error}") from error
    if not isinstance(peer, dict):
        raise ConfigError(f"peer = {value!r} is no object", 'As in {"kind": "mooncake", "master": "10.0.0.1:50051"}')
    for name in peer:
        _check_known(str(name), PeerConfig.__struct_fields__, shown=f"peer.{name}")
    sizes = {name: parse_size(peer[name]) for name in ("memory", "offer") if name in peer}
    return peer | sizes


def _expand(directory: Any, rank: int) -> str:
    if not isinstance(directory, str) or "://" in directory:
        raise ConfigError(f"{directory!r} is not a directory", "Write a plain absolute path")
    expanded = os.path.expandvars(os.path.expanduser(directory.strip()))  # first: ${HOME} is no placeholder
    known = {"{rank}": str(rank), "{hostname}": socket.gethostname()}
    filled = re.sub(r"\{[^{}]*\}", lambda match: known.get(match[0], match[0]), expanded)
    if "{" in filled or "}" in filled or "\0" in filled:
        raise ConfigError(f"{directory!r} has an unknown placeholder", f"Known: {', '.join(known)}")
    if raw_name(filled):
        return filled
    return re.sub("^/+", "/", os.path.normpath(filled)) if filled else ""


def _check_directories(storage_dirs: tuple[str, ...], index_dir: str) -> None:
    directories = [each for each in storage_dirs if not raw_name(each)]
    for directory in (*directories, *filter(None, [index_dir])):
        if not os.path.isabs(directory):
            raise ConfigError(
                f"{directory!r} is not an absolute path", "Write it from the root, as in /mnt/nvme0/tutti"
            )
    if len(set(storage_dirs)) != len(storage_dirs):
        raise ConfigError("storage_dirs names one directory twice", "Give each drive its own directory")


def _check_raw_drives(config: Config) -> None:
    raw = [each for each in config.storage_dirs if raw_name(each)]
    if raw and config.engine != "gio":
        raise ConfigError(f"{raw[0]} is a raw drive, which only engine = gio can drive", "Set engine to gio")
    if raw and not config.index_dir:
        raise ConfigError(
            f"{raw[0]} is a raw drive and has no room for the index", "Set index_dir to a directory on another disk"
        )
