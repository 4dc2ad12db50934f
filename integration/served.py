"""The model that this process serves: its identity is taken before its files are loaded, and changes with its weights.

Files may be overwritten while the server runs, weights may come by another way than files: a backend that is attached
later must not take what lies on the disk now for what the KV cache was computed with.
"""

import contextlib
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
from sglang.srt.runtime_context import get_disagg, get_memory, get_model

from tutti_sglang.integration.identity import Identity, published_identity, stand_in_identity, weights_of
from tutti_sglang.integration.ranks import shared_id
from tutti_sglang.store.fingerprint import CONFIG_ONLY

logger = logging.getLogger(__name__)

_UPDATED = "updated:"


class Served:
    """One for each scheduler process, `served`.

    Ranks count updates alike, for each request of SGLang's reaches all of them in the same order: the launch's shared
    id and the number of the update name new weights on all ranks without a word between them.
    """

    def __init__(self) -> None:
        self._taken: Identity | None = None
        self._launch = ""
        self._updates = 0
        self._reading: tuple[str, str | None, str] | None = None
        self._files = self._version = ""
        self.flushed = True
        """Whether SGLang has dropped its cache since the last update."""

    def take(self) -> None:
        """SGLang has published its configuration and has not loaded the model yet.

        A model that must be downloaded first lies in files that nobody overwrites: it waits until the attach.
        """
        memory = get_memory()
        used = (
            memory.enable_hierarchical_cache
            or memory.enable_unified_cache_external_linker
            or get_disagg().disaggregation_decode_enable_offload_kvcache
        )
        if used and Path(get_model().model_path).exists():
            self._taken = published_identity()

    def change(self) -> None:
        """The weights are not, or may not be, what they were."""
        self._updates += 1
        self._files = self._version = ""
        self.flushed = False

    def flush(self) -> None:
        """SGLang has dropped what it had computed."""
        self.flushed = True

    @contextlib.contextmanager
    def loading(self, model_path: str, load_format: str | None) -> Iterator[None]:
        """Weights come from these files, if `succeed` is called inside and the files are the same before and after."""
        self._reading = model_path, load_format, _files(model_path, load_format)
        try:
            yield
        finally:
            self._reading = None

    def succeed(self, version: str | None) -> None:
        """The update that is under way went well; `version`: what the caller calls the weights now, if anything."""
        self._version = version or self._version
        if self._reading:
            model_path, load_format, before = self._reading
            self._files = before if before == _files(model_path, load_format) else ""

    def identity(self, served_name: str | None, model_id: str, *, trust_version: bool = False) -> Identity:
        """Of what is served now. `model_id`: the user's own addition; `trust_version`: equal versions, same weights."""
        self._taken = self._taken or published_identity()
        identity = self._taken or stand_in_identity(served_name, model_id)
        if model_id:
            identity = msgspec.structs.replace(identity, model=f"{identity.model}#{model_id}")
        changes = self._changed(identity, trust_version) if self._updates else {}
        return msgspec.structs.replace(identity, **changes)

    def _changed(self, identity: Identity, trust_version: bool) -> dict[str, str]:
        if self._files and not identity.draft_weights:
            return {"weights": self._files}
        if trust_version and self._version:
            return {"weights": f"version:{self._version}+{identity.weights}"}
        if not self._launch:
            try:
                self._launch = shared_id()
            except RuntimeError:  # the ranks' key-value store is gone, and with it the server before long
                self._launch = uuid.uuid4().hex
        return {"weights": f"{_UPDATED}{self._launch}:{self._updates}", "draft_weights": ""}


def is_repeatable(identity: Identity) -> bool:
    """Whether another process could have the same identity, so that what is stored under it is worth keeping."""
    return not identity.weights.startswith(_UPDATED)


def _files(model_path: str, load_format: str | None) -> str:
    """The fingerprint of a checkpoint on this machine; empty where there is none."""
    try:
        weights = weights_of(model_path, None, load_format or get_model().load_format)
    except Exception:
        logger.exception("tutti: the weight files cannot be read, so nothing that they lead to outlives this server")
        return ""
    return "" if weights.startswith(CONFIG_ONLY) else weights


served = Served()
