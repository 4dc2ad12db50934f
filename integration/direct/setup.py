"""What the direct path is started with: SGLang's parameters turned into those of the tier, and what is refused."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_model, get_parallel

from tutti_sglang.errors import UnsupportedError
from tutti_sglang.integration.ranks import START_SECONDS, Attempt
from tutti_sglang.integration.tier import Tier
from tutti_sglang.integration.writers import Place, must_write


class Ranks:
    """The ranks that must decide alike: those whose answers SGLang compares (unified_radix_cache.py:355)."""

    def __init__(self, params: Any) -> None:
        attention = (params.attn_cp_cache_group, params.attn_tp_cache_group)
        self._groups = [group for group in attention if _size(group) > 1]
        if not self._groups and _size(params.tp_cache_group) > 1:
            self._groups = [params.tp_cache_group]

    def all(self, flags: list[bool]) -> list[bool]:
        """For each flag whether it is set on all ranks, which call this together."""
        if not self._groups:
            return flags
        mask = torch.tensor(flags, dtype=torch.int)
        for group in self._groups:
            torch.distributed.all_reduce(mask, op=torch.distributed.ReduceOp.MIN, group=group)
        return [bool(flag) for flag in mask.tolist()]


@contextlib.contextmanager
def together() -> Iterator[Attempt]:
    """Around what each rank does to start: if one cannot, no other waits for it."""
    attempt = Attempt("direct", START_SECONDS)
    try:
        yield attempt
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # the ranks' store went with rank 0
            attempt.fail(error)
        raise


def open_tier(storage: HiCacheStorageConfig, attempt: Attempt, seconds: float, engine: str = "") -> Tier:
    """On all ranks, which must mean the same model by it; of those that hold the same bytes one writes. RankError, and
    what Tier raises; what was open is closed within `seconds` then. `engine`: as of Tier."""
    tier = Tier(storage, generic=False, path="direct", engine=engine)
    try:
        notes = attempt.agree(tier.facts(), msgspec.json.encode(tier.place()).decode())
    except BaseException:
        tier.close(seconds)
        raise
    places = [msgspec.json.decode(note, type=Place) for note in notes]
    tier.writes_replicas = tier.writes_replicas or must_write(tier.place(), places)
    return tier


def storage_config(params: Any, extra: dict[str, Any], *, replicated: bool) -> HiCacheStorageConfig:
    """As SGLang makes it for the host path (cache_controller.py:748), so that both find the same objects."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    return HiCacheStorageConfig(
        tp_rank=torch.distributed.get_rank(group=group) if _size(group) > 1 else 0,
        tp_size=_size(group),
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=replicated,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=_published(get_model, "model_path", ""),
        extra_config={"path": "direct", **extra},
    )


def refuse(params: Any) -> None:
    """UnsupportedError for what would be served wrongly."""
    hint = 'Set "path": "host" in the extra config'
    if params.pp_size > 1:
        raise UnsupportedError(
            "The direct path does not serve pipeline parallelism (--pp-size > 1): SGLang's linker compares what can be "
            "restored within a stage only, and stages that differ would deadlock",
            hint,
        )
    if _published(get_parallel, "dcp_size", 1) > 1:
        raise UnsupportedError("The direct path does not serve decode context parallelism (--dcp-size > 1)", hint)
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools or params.mtp_draft_mamba_pools:
        raise UnsupportedError("The direct path does not keep the KV of a draft model (speculative decoding)", hint)


def _published(part: Callable[[], Any], name: str, otherwise: Any) -> Any:
    """What SGLang published in this process; outside a server it publishes nothing."""
    try:
        return getattr(part(), name)
    except ValueError:
        return otherwise


def _size(group: Any) -> int:
    return torch.distributed.get_world_size(group=group) if group is not None else 1
