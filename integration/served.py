"""The model that this process serves: its identity is taken before its files are loaded, and given up with its weights.

Files may be overwritten while the server runs, weights may come by another way than files: a backend that is attached
later must not take what lies on the disk now for what the KV cache was computed with.
"""

import logging
import uuid
from pathlib import Path

import msgspec
from sglang.srt.runtime_context import get_memory, get_model

from tutti_sglang.integration.identity import Identity, published_identity, stand_in_identity

logger = logging.getLogger(__name__)

_UPDATED = "updated:"


class Served:
    """One for each scheduler process, `served`."""

    def __init__(self) -> None:
        self._taken: Identity | None = None
        self._changed = False

    def take(self) -> None:
        """SGLang has published its configuration and has not loaded the model yet.

        A model that must be downloaded first lies in files that nobody overwrites: it waits until the attach.
        """
        if get_memory().enable_hierarchical_cache and Path(get_model().model_path).exists():
            self._taken = published_identity()

    def change(self) -> None:
        """The weights are not, or may not be, those of the files any more."""
        self._changed = True

    def identity(self, served_name: str | None, model_id: str) -> Identity:
        """Of what is served now. `model_id`: the user's own addition."""
        identity = self._taken or published_identity() or stand_in_identity(served_name, model_id)
        if model_id:
            identity = msgspec.structs.replace(identity, model=f"{identity.model}#{model_id}")
        return renewed(identity) if self._changed else identity


def renewed(identity: Identity) -> Identity:
    """The same model with weights that no file describes: nobody else, at no time, will have this identity."""
    return msgspec.structs.replace(identity, weights=f"{_UPDATED}{uuid.uuid4().hex}", draft_weights="")


def is_repeatable(identity: Identity) -> bool:
    """Whether another process could have the same identity, so that what is stored under it is worth keeping."""
    return not identity.weights.startswith(_UPDATED)


served = Served()
