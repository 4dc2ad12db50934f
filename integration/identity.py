"""Who the KV cache belongs to: the namespace of a pool, from what SGLang published in the scheduler process.

SGLang's keys hold tokens, LoRA and salts, nothing of the model: without this, two models under one served name would
read each other's pages.
"""

import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_lora, get_model, get_server_args, get_spec

from tutti_sglang.integration.pools import PoolView
from tutti_sglang.layout import Order
from tutti_sglang.store.fingerprint import CONFIG_ONLY, weights_fingerprint
from tutti_sglang.store.namespace import Namespace

logger = logging.getLogger(__name__)

_VOLATILE = ("_name_or_path", "transformers_version")
"""Keys of a Hugging Face config that say where it was read from and by what."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The model as far as the bytes of its KV cache depend on it.

    `model`: JSON text; `weights`, `draft_weights`: fingerprints; `kv_dtype`: SGLang's name of the logical dtype, which
    a pool of bytes does not know; `kv_heads`: of the whole model, 0 when unknown.
    """

    model: str
    weights: str
    draft_weights: str = ""
    kv_dtype: str = ""
    kv_heads: int = 0
    speculative: str = ""


def published_identity() -> Identity | None:
    """The identity of the model that this process serves; None when SGLang published no configuration here."""
    try:
        server_args = get_server_args()
    except ValueError:
        return None
    # Built anew: the instance that the engine holds has been changed by loading the model (rope, layer maps …).
    config = ModelConfig.from_server_args(server_args)
    model, spec, lora = get_model(), get_spec(), get_lora()
    described = {
        "architecture": config.hf_config.architectures,
        "config": config_digest(config.hf_config),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "modelopt_quant": model.modelopt_quant,
        "rl_quant_profile": model.rl_quant_profile,
        "kv_scales": model.quantization_param_path,
        "revision": config.revision,
        "lora": _adapters(lora.lora_paths) if lora.enable_lora else None,
    }
    draft = spec.speculative_draft_model_path
    return Identity(
        model=_text({key: value for key, value in described.items() if value}),
        weights=weights_of(config.model_path, config.revision, model.load_format),
        draft_weights=weights_of(draft, spec.speculative_draft_model_revision, model.load_format) if draft else "",
        kv_dtype=model.kv_cache_dtype,
        kv_heads=config.get_total_num_kv_heads(),
        speculative=spec.speculative_algorithm or "",
    )


def stand_in_identity(served_name: str | None, model_id: str) -> Identity:
    """What is left where nothing was published: the name. Two models under one name would meet."""
    logger.warning(
        "tutti: SGLang published no model configuration in this process, so only the served name %r and model_id %r "
        "keep models apart. Set another model_id for each model, checkpoint and KV dtype",
        served_name,
        model_id,
    )
    return Identity(model=_text({"served_name": served_name or ""}), weights="unknown")


def config_digest(hf_config: Any) -> str:
    """Hex digest of a Hugging Face config as it is in effect, overrides included."""
    fields = {key: value for key, value in hf_config.to_dict().items() if key not in _VOLATILE}
    return xxhash.xxh3_128_hexdigest(_text(fields).encode())


def head_groups(identity: Identity, storage: HiCacheStorageConfig, pool: Any) -> int:
    """Objects into which a page is cut, so that TP sizes that divide `tp_lcm_size` share them; 1 where the heads of the
    model cannot be told apart."""
    if not storage.should_split_heads or pool.layout != "page_head":
        return 1
    if _first_head(identity, storage, pool.head_num) is None:
        logger.warning(
            "tutti: the heads of this model cannot be numbered: its pages stay with TP size %d", storage.tp_size
        )
        return 1
    groups: int = storage.tp_lcm_size // storage.tp_size
    return groups


def namespaces(identity: Identity, storage: HiCacheStorageConfig, view: PoolView, pool: str) -> tuple[Namespace, ...]:
    """One namespace for each page map of `view`; none for a logical pool."""
    if view.logical:
        return ()
    drafts = view.packs_draft or pool.startswith("draft")
    sharded = is_sharded(storage, view)
    # The heads of a side pool may be more or fewer than the model's (sliding windows, drafts).
    first = _first_head(identity, storage, view.heads) if pool == "kv" else None
    assert first is not None or len(view.maps) == 1
    cut = view.heads // len(view.maps)
    return tuple(
        Namespace(
            model=identity.model,
            weights=_weights_of(identity, drafts=drafts),
            dtype=_logical_dtype(identity, view.dtype),
            page_size=view.page_size,
            pool=pool,
            order=each.order,
            tensors=each.sizes,
            layers=view.layers,
            heads=None if first is None else (first + group * cut, first + (group + 1) * cut),
            tp=(storage.tp_rank, storage.tp_size) if sharded and first is None else (0, 1),
            pp=(storage.pp_rank, storage.pp_size),
            cp=(storage.attn_cp_rank, storage.attn_cp_size),
            dcp=(storage.dcp_rank, storage.dcp_size),
            speculative=identity.speculative,
        )
        for group, each in enumerate(view.maps)
    )


def is_sharded(storage: HiCacheStorageConfig, view: PoolView) -> bool:
    """Whether each TP rank has objects of its own: its bytes differ, or SGLang takes no rank for the one that writes
    (cache_controller.py:771)."""
    return view.sharded or not storage.is_mla_model


def flat_namespace(
    identity: Identity, storage: HiCacheStorageConfig, anchor: PoolView | None, nbytes: int, dtype: str
) -> Namespace:
    """Of objects that come and go as tensors of `nbytes` bytes; `anchor` gives their order, format and page size, if
    known."""
    form = anchor.dtype.partition(":")[2] if anchor else ""
    return Namespace(
        model=identity.model,
        weights=_weights_of(identity, drafts=anchor is not None and anchor.packs_draft),
        dtype=_logical_dtype(identity, f"{dtype}:{form}" if form else dtype),
        page_size=anchor.page_size if anchor else 1,
        pool="flat",
        order=anchor.maps[0].order if anchor and anchor.maps else Order.LAYER,
        tensors=(nbytes,),
        layers=anchor.layers if anchor else (0, 1),
        tp=(0, 1) if storage.is_mla_model else (storage.tp_rank, storage.tp_size),
        pp=(storage.pp_rank, storage.pp_size),
        cp=(storage.attn_cp_rank, storage.attn_cp_size),
        dcp=(storage.dcp_rank, storage.dcp_size),
        speculative=identity.speculative,
    )


def _weights_of(identity: Identity, *, drafts: bool) -> str:
    return f"{identity.weights}+{identity.draft_weights}" if drafts else identity.weights


def _logical_dtype(identity: Identity, dtype: str) -> str:
    """A pool of bytes does not know what they mean."""
    return f"{identity.kv_dtype}/{dtype}" if dtype.startswith("uint8") else dtype


def _first_head(identity: Identity, storage: HiCacheStorageConfig, heads: int) -> int | None:
    """The model's number of the first of this rank's `heads` KV heads; None where it cannot be told, so that TP shards
    stay apart."""
    if not heads or not identity.kv_heads or heads != max(1, identity.kv_heads // storage.tp_size):
        return None
    copies = max(1, storage.tp_size // identity.kv_heads)  # ranks that hold the same head
    first: int = storage.tp_rank // copies * heads
    return first


def weights_of(model_path: str, revision: str | None, load_format: str) -> str:
    """Fingerprint of a checkpoint; without files on this machine what is left: its name and revision."""
    checkpoint = _checkpoint(model_path, revision)
    weights = weights_fingerprint(checkpoint, load_format)
    if load_format == "dummy" or not weights.startswith(CONFIG_ONLY):
        return weights
    logger.warning(
        "tutti: no weight files of %s on this machine, so only its name, revision and configuration keep it apart. "
        "Set another model_id after each change of the weights",
        model_path,
    )
    return f"{weights}:{model_path}@{revision or ''}"


def _adapters(lora_paths: Any) -> dict[str, str]:
    """Fingerprints of the adapters that SGLang's keys know by name and path alone (lora/lora_registry.py:47)."""
    prints = {}
    for adapter in lora_paths or ():
        folder = Path(_checkpoint(adapter.lora_path, None))
        settings = folder / "adapter_config.json"
        scale = xxhash.xxh3_64_hexdigest(settings.read_bytes()) if settings.is_file() else ""
        prints[f"{adapter.lora_name}={adapter.lora_path}"] = weights_fingerprint(folder) + scale
    return prints


def _checkpoint(model_path: str, revision: str | None) -> str:
    """The local directory (or file) of a model that may be a Hugging Face name."""
    if Path(model_path).exists():
        return model_path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        cache_dir = get_model().download_dir
        return snapshot_download(model_path, revision=revision, cache_dir=cache_dir, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return model_path


def _text(value: Any) -> str:
    """JSON, the same in every process: keys sorted, no memory addresses."""

    def plain(other: Any) -> str:
        return re.sub(r" at 0x[0-9a-f]+", "", str(other))

    # Twice: the keys of a config's id2label are integers, which a deterministic order does not accept.
    value = msgspec.to_builtins(value, enc_hook=plain, str_keys=True)
    return msgspec.json.encode(value, order="deterministic").decode()
