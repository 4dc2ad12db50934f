"""Settings come from where the user expects, and a bad one says what to do."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.config import ENV_PREFIX, SGLANG_KEYS, Config, load_config, raw_name, read_extra_config
from tutti_sglang.errors import ConfigError

DIRS = {"storage_dirs": ["/mnt/a", "/mnt/b"]}


def test_extra_config_beats_environment_beats_default() -> None:
    environ = {ENV_PREFIX + "MAX_SIZE": "1GiB", ENV_PREFIX + "QUEUE_DEPTH": "8"}
    loaded = load_config(DIRS | {"max_size": "2GiB"}, environ)
    assert loaded.config.max_size == 2 << 30
    assert loaded.config.queue_depth == 8
    assert loaded.config.fsync == "none"
    assert loaded.origin["max_size"] == f"extra config, overrides {ENV_PREFIX}MAX_SIZE"
    assert loaded.origin["queue_depth"] == ENV_PREFIX + "QUEUE_DEPTH"
    assert loaded.origin["fsync"] == "default"


def test_the_start_up_line_names_every_value_and_its_origin() -> None:
    line = load_config(DIRS | {"max_size": "2GiB"}, {ENV_PREFIX + "FSYNC": "each"}).describe()
    assert "max_size=2GiB (extra config)" in line
    assert f"fsync=each ({ENV_PREFIX}FSYNC)" in line
    assert "queue_depth" not in line


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "storage_dirs is not set"),
        ({"storage_dirs": []}, "storage_dirs is not set"),
        ({"storage_dir": ["/x"]}, "Did you mean 'storage_dirs'"),
        ({"storage_dirs": ["x"]}, "not an absolute path"),
        ({"storage_dirs": ["./x"]}, "not an absolute path"),
        ({"storage_dirs": ["file:///x"]}, "plain absolute path"),
        ({"storage_dirs": ["/x", "/x/"]}, "one directory twice"),
        ({"storage_dirs": ["/x/{gpu}"]}, "unknown placeholder"),
        ({"storage_dirs": ["/x/{"]}, "unknown placeholder"),
        ({"storage_dirs": [7]}, "not a directory"),
        (DIRS | {"index_dir": "idx"}, "not an absolute path"),
        (DIRS | {"max_size": "20XB"}, "max_size: '20XB' is not a size"),
        (DIRS | {"max_size": "1MiB"}, "holds no segment"),
        (DIRS | {"segment_size": "100KiB"}, "segment_size"),
        (DIRS | {"engine": "warp"}, "engine"),
        (DIRS | {"queue_depth": 0}, "queue_depth"),
        (DIRS | {"queue_depth": "many"}, "queue_depth"),
        (DIRS | {"low_watermark": 0.9, "high_watermark": 0.5}, "low_watermark"),
        (DIRS | {"max_io": 5000}, "multiple of 4KiB"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        load_config(extra, {})
    assert says in str(caught.value)


def test_an_unknown_environment_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MAXSIZE.*max_size"):
        load_config(DIRS, {ENV_PREFIX + "MAXSIZE": "1GiB"})


def test_keys_of_sglang_that_still_arrive_are_ignored() -> None:
    assert load_config(DIRS | dict.fromkeys(SGLANG_KEYS, 1), {}).config == load_config(DIRS, {}).config


def test_directories_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config({"storage_dirs": "~/a, $HOME/b/../c,/r{rank}"}, {}, rank=3).config
    assert config.storage_dirs == ("/home/someone/a", "/home/someone/c", "/r3")


def test_environment_lists_directories_with_commas() -> None:
    assert load_config({}, {ENV_PREFIX + "STORAGE_DIRS": "/a,/b"}).config.storage_dirs == ("/a", "/b")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"storage_dirs": ["/a"], "max_size": "1GiB"}'),
        ("c.toml", 'storage_dirs = ["/a"]\nmax_size = "1GiB"\n'),
        ("c.yaml", "storage_dirs: [/a]\nmax_size: 1GiB\n"),
    ],
)
def test_a_config_file_says_the_same_in_every_notation(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_extra_config(f"@{tmp_path / name}") == {"storage_dirs": ["/a"], "max_size": "1GiB"}


@pytest.mark.parametrize("text", ["{", "[1]", "@/nonexistent.json", "7", '"x"'])
def test_an_extra_config_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="extra config"):
        read_extra_config(text)


_json = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.text() | st.integers(), max_size=3)
)


@given(st.dictionaries(st.sampled_from(Config.__struct_fields__), _json))
def test_any_value_loads_or_is_a_config_error(extra: dict[str, object]) -> None:
    try:
        loaded = load_config(extra, {})
    except ConfigError:
        return
    assert all(directory.startswith("/") for directory in loaded.config.storage_dirs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vfio:0000:01:00.0", ("0000:01:00.0", 0)),
        ("vfio:0000:C1:1f.7/12", ("0000:c1:1f.7", 12)),
        ("vfio:0000:01:00.0/0", None),
        ("vfio:01:00.0", None),
        ("/mnt/vfio:0000:01:00.0", None),
    ],
)
def test_a_raw_drive_has_an_address_and_perhaps_a_namespace(text: str, expected: tuple[str, int] | None) -> None:
    assert raw_name(text) == expected


def test_a_raw_drive_needs_the_gio_engine_and_an_index_elsewhere() -> None:
    raw = {"storage_dirs": ["vfio:0000:0{rank}:00.0"], "engine": "gio", "index_dir": "/x"}
    config = load_config(raw | {"overwrite": "S1,S2"}, {}, rank=3).config
    assert config.storage_dirs == ("vfio:0000:03:00.0",)
    assert config.overwrite == ("S1", "S2")
    for missing, said in (("engine", "engine = gio"), ("index_dir", "index_dir")):
        with pytest.raises(ConfigError, match=said):
            load_config({name: value for name, value in raw.items() if name != missing}, {})


@pytest.mark.parametrize("bad", ["vfio:0000:01:00", "vfio:nvme0", "vfio:"])
def test_what_is_nearly_a_raw_drive_is_an_error(bad: str) -> None:
    with pytest.raises(ConfigError, match="absolute"):
        load_config({"storage_dirs": [bad], "engine": "gio", "index_dir": "/x"}, {})
