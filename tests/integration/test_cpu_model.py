"""The built-in model is the same for everybody who builds it, whole or absent, and reads any text."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_sglang.integration.cpu_model import EOS, SPECIALS, VOCABULARY, Shape, _config, built_in_model, write_model

pytest.importorskip("sglang", reason="SGLang, which brings safetensors and tokenizers, is not installed")

ROOT = Path(__file__).parent.parent.parent


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_in_model(tmp_path_factory.mktemp("models"))


def test_a_seed_gives_the_same_files_everywhere(model: Path) -> None:
    # Written down so that a change is noticed: it needs another REVISION, or old folders would pass for the new model.
    assert _digest(model) == "701868f09143fef9c22493adbb475916019e2339aea814f1b6a9f02626a12e94"


def test_another_seed_changes_the_weights_and_nothing_else(model: Path, tmp_path: Path) -> None:
    other = built_in_model(tmp_path, seed=1)
    differing = [file.name for file in model.iterdir() if file.read_bytes() != (other / file.name).read_bytes()]
    assert differing == ["model.safetensors"]
    assert (model / "model.safetensors").stat().st_size == (other / "model.safetensors").stat().st_size


def test_weights_can_be_saved_over_a_model(model: Path, tmp_path: Path) -> None:
    folder = built_in_model(tmp_path, seed=1)
    write_model(folder, seed=0)
    assert _digest(folder) == _digest(model)


def test_builders_that_race_agree_and_leave_nothing_else(model: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tutti_sglang.integration.cpu_model import built_in_model;"
    code += f"sys.stdin.read(); print(built_in_model(Path({str(tmp_path)!r})))"
    command = [sys.executable, "-c", code]
    racers = [subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True) for _ in range(4)]
    for racer in racers:
        assert racer.stdin
        racer.stdin.close()
    answers = {racer.stdout.read().strip() for racer in racers if racer.stdout}
    assert [racer.wait(60) for racer in racers] == [0] * 4
    assert [str(path) for path in tmp_path.iterdir()] == list(answers)
    assert _digest(Path(answers.pop())) == _digest(model)


def test_a_builder_that_dies_leaves_no_half_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetensors.numpy.save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        built_in_model(tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    monkeypatch.undo()
    assert (built_in_model(tmp_path) / "model.safetensors").exists()


@given(text=st.text())
def test_every_text_is_its_bytes_and_comes_back(model: Path, text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    if not any(special in text for special in SPECIALS):
        assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_chat_becomes_turns_between_special_tokens(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    assert tokenizer(text).input_ids.count(EOS) == 2
    assert tokenizer.eos_token_id == EOS


SHAPES = {
    "grouped heads": Shape(),
    "latent": Shape(latent=128),
    "window": Shape(window=128),
    "state": Shape(state=16),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_only_printable_characters_and_the_end_can_win(shape: Shape, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    folder = built_in_model(tmp_path, shape=shape)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert np.flatnonzero(head.any(axis=1)).tolist() == [*range(32, 127), EOS]
    assert head.shape == (VOCABULARY, shape.hidden)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCABULARY


def test_each_shape_is_another_network() -> None:
    """What tells them apart to SGLang, which picks its pools and its tree by the architecture."""
    configs = [_config(shape) for shape in SHAPES.values()]
    assert len({config["architectures"][0] for config in configs}) == len(SHAPES)
    kinds = _config(Shape(window=128))["layer_types"]
    assert {"sliding_attention", "full_attention"} == set(kinds)
    assert len(kinds) == Shape().layers


def test_the_default_is_small_and_has_a_long_context(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert config["num_attention_heads"] > config["num_key_value_heads"] > 1
    assert config["num_hidden_layers"] >= 4
    assert config["max_position_embeddings"] >= 32768
    assert sum(file.stat().st_size for file in model.iterdir()) < 8e6
