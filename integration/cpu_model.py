"""The built-in model: a Llama of 7 MB with random weights, for servers that run without a GPU and without a network.

Other shapes are other networks, each one that needs no kernel of its own: with `latent` a MiniCPM3 (a latent KV cache,
MLA), with `window` a Mellum (sliding-window attention beside full attention), with `state` a Falcon-H1 (Mamba2 beside
attention).

Its replies are noise, yet they are no less sensitive to the KV cache than a real model's: attention is sharp and its
share of the residual stream is large, so that one changed token of the prompt, or one wrong page, changes what follows.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Matrix = Callable[[int, int, float], Array]

DEFAULT_CACHE = Path("~/.cache/tutti-sglang/models")
REVISION = 1  # part of the folder's name: raise it when the same seed gives other files


class Shape(NamedTuple):
    """Sizes of the network; each of the defaults also divides by a TP size of 2."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 256
    context: int = 65536
    latent: int = 0  # MLA's kv_lora_rank; 0: K and V of `kv_heads` heads
    window: int = 0  # tokens that three layers of four see; 0: all see all
    state: int = 0  # values of Mamba2's state for each of its channels; 0: no Mamba2


SPECIALS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
BOS, EOS = 256, 257
ROPE_DIM = 32  # the part of a latent model's key that turns with the position
ROPE_THETA = 500000.0
CONVOLUTION = 4  # tokens that Mamba2 mixes before its state
VOCABULARY = 320  # 256 bytes and the specials, rounded up to SGLang's padding
CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def built_in_model(cache: Path | None = None, seed: int = 0, shape: Shape | None = None) -> Path:
    """The folder of the model, written at first use; processes that race get the same folder. Raises OSError."""
    shape = shape or Shape()
    root = (cache or DEFAULT_CACHE).expanduser()
    name = f"tutti-tiny-{REVISION}-seed{seed}"
    if shape != Shape():
        name += "-" + "x".join(map(str, shape))
    folder = root / name
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        write_model(scratch, seed, shape)
        scratch.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was first; its files are the same
            scratch.rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_model(folder: Path, seed: int = 0, shape: Shape | None = None) -> None:
    """Write config, tokenizer and weights into `folder`, over what is there. Equal arguments give equal bytes."""
    from safetensors.numpy import save_file

    shape = shape or Shape()
    for name, content in (
        ("config.json", _config(shape)),
        ("generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS}),
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", _tokenizer_config(shape)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))
    save_file(_weights(seed, shape), folder / "model.safetensors", metadata={"format": "pt"})


def _config(shape: Shape) -> dict[str, Any]:
    common = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.context,
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    if shape.latent:
        return common | _latent_config(shape)
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if shape.window:
        kind = _window_config(shape)
    elif shape.state:
        kind = _state_config(shape)
    return common | kind | {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}


def _latent_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        "num_key_value_heads": shape.heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.latent,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": shape.hidden // shape.heads,
        "scale_emb": 1,
        "scale_depth": shape.layers**0.5,
        "dim_model_base": shape.hidden,
    }


def _window_config(shape: Shape) -> dict[str, Any]:
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "layer_types": [kinds[layer % len(kinds)] for layer in range(shape.layers)],
        "sliding_window": shape.window,
        "use_sliding_window": True,
        "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
        "mlp_layer_types": ["dense"] * shape.layers,
        "num_experts": 1,  # SGLang counts them, though no layer has any
        "num_experts_per_tok": 1,
    }


def _state_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "mamba_d_ssm": shape.hidden,
        "mamba_n_heads": shape.heads,
        "mamba_d_head": shape.hidden // shape.heads,
        "mamba_d_state": shape.state,
        "mamba_d_conv": CONVOLUTION,
        "mamba_chunk_size": 64,
    }


def _tokenizer() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges: a token is a byte, whatever the text."""
    special = [
        {"id": 256 + i, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, text in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())},
            "merges": [],
        },
    }


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in every byte-level tokenizer (GPT-2's bytes_to_unicode)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def _weights(seed: int, shape: Shape) -> dict[str, Array]:
    """Name → float32 matrix, in the scales that the module's docstring asks for.

    RandomState, since NumPy promises its stream for ever; the stream of a Generator may change with a release.
    """
    random = np.random.RandomState(seed)

    def matrix(rows: int, columns: int, gain: float) -> Array:
        return np.asarray(random.standard_normal((rows, columns)) * (gain / columns**0.5), np.float32)

    ones = np.ones(shape.hidden, np.float32)
    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, shape.hidden, 0.5 * shape.hidden**0.5)}
    second_norm, feed_forward = (
        ("pre_ff_layernorm", "feed_forward") if shape.state else ("post_attention_layernorm", "mlp")
    )
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        attention = _latent_attention(shape, matrix) if shape.latent else _grouped_attention(shape, matrix)
        weights |= {f"{prefix}self_attn.{name}.weight": value for name, value in attention.items()}
        if shape.state:
            weights |= {f"{prefix}mamba.{name}": value for name, value in _recurrence(shape, matrix).items()}
        weights |= {
            prefix + "input_layernorm.weight": ones,
            prefix + second_norm + ".weight": ones,
            prefix + feed_forward + ".gate_proj.weight": matrix(shape.intermediate, shape.hidden, 1.0),
            prefix + feed_forward + ".up_proj.weight": matrix(shape.intermediate, shape.hidden, 1.0),
            prefix + feed_forward + ".down_proj.weight": matrix(shape.hidden, shape.intermediate, 2.0),
        }
    head = matrix(VOCABULARY, shape.hidden, 3.0)
    speakable = [*range(ord(" "), ord("~") + 1), EOS]
    head[np.setdiff1d(np.arange(VOCABULARY), speakable)] = 0  # a logit of 0 never wins against the best of 96 others
    last_norm = "final_layernorm" if shape.state else "norm"
    return weights | {f"model.{last_norm}.weight": ones, "lm_head.weight": head}


def _grouped_attention(shape: Shape, matrix: Matrix) -> dict[str, Array]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "q_proj": matrix(queries, shape.hidden, 2.5),
        "k_proj": matrix(keys, shape.hidden, 2.5),
        "v_proj": matrix(keys, shape.hidden, 1.0),
        "o_proj": matrix(shape.hidden, queries, 4.0),
    }
    if shape.window:  # the network makes queries and keys of equal length again before it turns them
        sharp = np.full(shape.head_dim, 2.5, np.float32)
        weights |= {"q_norm": sharp, "k_norm": sharp}
    return weights


def _recurrence(shape: Shape, matrix: Matrix) -> dict[str, Array]:
    """Mamba2: each head forgets at its own pace, over some 10 to 1000 tokens."""
    channels = shape.hidden + 2 * shape.state
    return {
        "in_proj.weight": matrix(shape.hidden + channels + shape.heads, shape.hidden, 1.0),
        "conv1d.weight": matrix(channels, CONVOLUTION, 1.0)[:, None],
        "conv1d.bias": np.zeros(channels, np.float32),
        "A_log": np.log(np.geomspace(0.002, 0.2, shape.heads)).astype(np.float32),
        "dt_bias": np.zeros(shape.heads, np.float32),
        "D": np.ones(shape.heads, np.float32),
        "out_proj.weight": matrix(shape.hidden, shape.hidden, 1.0),
    }


def _latent_attention(shape: Shape, matrix: Matrix) -> dict[str, Array]:
    value_dim = shape.hidden // shape.heads
    return {
        "q_proj": matrix(shape.heads * (shape.head_dim + ROPE_DIM), shape.hidden, 2.5),
        "kv_a_proj_with_mqa": matrix(shape.latent + ROPE_DIM, shape.hidden, 2.5),
        "kv_a_layernorm": np.ones(shape.latent, np.float32),
        "kv_b_proj": matrix(shape.heads * (shape.head_dim + value_dim), shape.latent, 2.5),
        "o_proj": matrix(shape.hidden, shape.heads * value_dim, 2.0),
    }
