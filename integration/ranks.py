"""What the ranks of a server decide together: to attach or not, and what weights without files are called.

Through the key-value store behind SGLang's process groups, never by a collective: one that a rank does not join stays
pending in its group, and SGLang's next one would be answered by it. An attempt that is not agreed must end on every
rank before SGLang makes groups (managers/cache_controller.py:635), because making them waits for all ranks for ever.
"""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch.distributed import distributed_c10d

from tutti_sglang.errors import RankError

START_SECONDS, SERVING_SECONDS = 600.0, 60.0
"""How long ranks wait for each other. At start one may pin host memory for minutes after another."""

_POLL_SECONDS = 0.02

Facts = Mapping[str, str]


def key_store() -> Any:
    """The store that all ranks of this server reach; None where this process is alone."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    return distributed_c10d._get_default_store()


def shared_id() -> str:
    """Random for each launch, and the same on all of its ranks, whichever of them asks first."""
    mine, store = uuid.uuid4().hex, key_store()
    return mine if store is None else str(store.compare_set("tutti/launch", "", mine).decode())


class Attempt:
    """To attach on all ranks or on none. `number`: the same on all ranks for the same attempt, and never used again."""

    def __init__(self, number: str, seconds: float) -> None:
        self._store = key_store()
        self._seconds = seconds
        self._number, self._step = number, 0
        self._rank = torch.distributed.get_rank() if self._store else 0

    def agree(self, facts: Facts, note: str = "") -> list[str]:
        """One step is done here: wait until it is on all ranks. `facts` must be equal on all of them; the `note` of
        each rank is returned.

        RankError says which rank is not there, has failed or differs; it is raised on all ranks or on none.
        """
        if self._store is None:
            return [note]
        step = self._name()
        self._step += 1
        self._store.set(f"{step}/{self._rank}", msgspec.json.encode((dict(facts), note)))
        if self._store.add(f"{step}/count", 1) == torch.distributed.get_world_size():
            self._decide(step, difference([facts for facts, _ in self._told(step)]))
        if reason := self._verdict(step):
            raise RankError(*reason.split("\0"))
        return [note for _, note in self._told(step)]

    def fail(self, reason: object) -> None:
        """This rank cannot: no other must wait for it. Does nothing where the step was decided already."""
        if self._store is not None:
            self._decide(self._name(), f"Rank {self._rank} cannot attach the storage: {reason}")

    def _told(self, step: str) -> list[tuple[dict[str, str], str]]:
        ranks = range(torch.distributed.get_world_size())
        told = (self._store.get(f"{step}/{rank}") for rank in ranks)
        return [msgspec.json.decode(each, type=tuple[dict[str, str], str]) for each in told]

    def _name(self) -> str:
        return f"tutti/attach/{self._number}/{self._step}"

    def _decide(self, step: str, reason: str) -> str:
        """The first decision stands; returns it."""
        return str(self._store.compare_set(f"{step}/verdict", "", reason or "yes").decode())

    def _verdict(self, step: str) -> str:
        """Why not, or nothing."""
        deadline = time.monotonic() + self._seconds
        while not self._store.check([f"{step}/verdict"]):
            if time.monotonic() > deadline:
                ranks = range(torch.distributed.get_world_size())
                late = [rank for rank in ranks if not self._store.check([f"{step}/{rank}"])]
                self._decide(step, f"Rank {late} did not attach the storage within {self._seconds:.0f} s\0{_LATE}")
                break
            time.sleep(_POLL_SECONDS)
        verdict = str(self._store.get(f"{step}/verdict").decode())
        return "" if verdict == "yes" else verdict


_LATE = "Look at that rank's log; a rank that is attached already needs a detach first"
_FILES = "Give all ranks the same model files, flags and settings"


def difference(told: list[dict[str, str]]) -> str:
    """What the ranks do not agree in: message and hint; empty when nothing."""
    first = told[0]
    for rank, facts in enumerate(told):
        for name in sorted({*first, *facts}):
            mine, theirs = first.get(name, "nothing"), facts.get(name, "nothing")
            if mine != theirs:
                return f"Rank {rank} has another {name} than rank 0: {theirs!r} and not {mine!r}\0{_FILES}"
    return ""
