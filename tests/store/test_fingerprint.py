"""The weights fingerprint: other weights differ, copies and touched files do not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tutti_sglang.store.fingerprint import BLOCK, weights_fingerprint

ROOT = Path(__file__).parents[2]


def _save(file: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    header, place = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [place, place + tensor.nbytes]}
        place += tensor.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in tensors.values()))


def _checkpoint(directory: Path, seed: int) -> Path:
    directory.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    for shard in range(2):
        tensors = {f"layer.{n}": rng.standard_normal((64, 512), dtype=np.float32) for n in range(3)}
        tensors["norm"] = rng.standard_normal(8, dtype=np.float32)
        tensors["empty"] = np.empty(0, np.float32)
        _save(directory / f"model-{shard}.safetensors", tensors)
    (directory / "config.json").write_text("{}")
    return directory


def test_other_weights_over_the_same_path_differ(tmp_path: Path) -> None:
    before = weights_fingerprint(_checkpoint(tmp_path / "model", 1))
    assert weights_fingerprint(_checkpoint(tmp_path / "model", 2)) != before
    assert weights_fingerprint(_checkpoint(tmp_path / "model", 1)) == before


def test_a_change_of_one_tensor_is_seen(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path / "model", 1)
    before = weights_fingerprint(checkpoint)
    file = checkpoint / "model-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-32:] = bytes(32)  # the small `norm` at the end
    file.write_bytes(data)
    assert weights_fingerprint(checkpoint) != before


def test_copied_and_touched_are_equal(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path / "model", 1)
    before = weights_fingerprint(checkpoint)
    os.utime(checkpoint / "model-0.safetensors", (1, 1))
    assert weights_fingerprint(checkpoint) == before
    copied = shutil.copytree(checkpoint, tmp_path / "copy")
    (copied / "README.md").write_text("not a weight")
    assert weights_fingerprint(copied) == before


def test_it_is_the_same_in_any_process(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path / "model", 1)
    code = f"from tutti_sglang.store.fingerprint import *; print(weights_fingerprint({str(checkpoint)!r}))"
    for seed in "1", "2":
        printed = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert printed.strip() == weights_fingerprint(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "broken.safetensors"])
def test_a_file_of_unknown_tensors_is_sampled(tmp_path: Path, name: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    (tmp_path / name).write_bytes(data)
    before = weights_fingerprint(tmp_path)
    assert weights_fingerprint(tmp_path / name) == weights_fingerprint(tmp_path / name)
    data[(len(data) - BLOCK) // 63 * 31 + 5] ^= 1
    (tmp_path / name).write_bytes(data)
    assert weights_fingerprint(tmp_path) != before
    (tmp_path / name).write_bytes(data[:-1])
    assert weights_fingerprint(tmp_path) != before


def test_safetensors_win_over_other_formats(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path / "model", 1)
    before = weights_fingerprint(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"old")
    assert weights_fingerprint(checkpoint) == before


def test_weights_in_no_file_are_marked(tmp_path: Path) -> None:
    assert weights_fingerprint(_checkpoint(tmp_path / "model", 1), "dummy") == "config-only:dummy"
    assert weights_fingerprint(tmp_path / "absent") == "config-only:no-files"
    (tmp_path / "nothing").mkdir()
    assert weights_fingerprint(tmp_path / "nothing") == "config-only:no-files"


def test_only_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = _checkpoint(tmp_path / "model", 1)
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    weights_fingerprint(checkpoint)
    assert sum(read) < 2 * (5 * BLOCK + 2048)
