"""Ranks under SGLang's own tree and controller, in processes with real gloo groups: they attach together or not at all,
and whatever one of them misses, loses or delays, all go on with the same prefix and none waits for ever (B37, B38)."""

import importlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.gloo import PAGE, Rank, on_ranks, only_on, replaced
from tests.integration.stores import objects
from tutti_sglang.integration import attaching, ranks, updating
from tutti_sglang.integration.cpu_model import built_in_model
from tutti_sglang.integration.ranks import difference

PROMPT = [7 + n % 5 for n in range(16 * PAGE)]
WHOLE = len(PROMPT)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _scheduler() -> None:
    """Once: this import takes half a minute on a small machine, and the ranks fork from here."""
    importlib.import_module("sglang.srt.managers.scheduler")


@pytest.fixture(scope="module")
def model() -> Path:
    return built_in_model()


def _is_off(rank: Rank) -> bool:
    """Nothing is attached, and nothing of an attempt is left."""
    controller = rank.tree.cache_controller
    names = [thread.name for thread in threading.enumerate()]
    left = [name for name in names if "prefetch" in name or "backup" in name or name.startswith("tutti")]
    return not controller.enable_storage and not rank.tree.enable_storage and not left


def _late(seconds: float) -> Callable[[Any], Any]:
    def value(before: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return before(*args, **kwargs)

        return slow

    return value


def _fails(before: Any) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(5, "EIO")

    return fail


def _without(page: int) -> Callable[[Any], Any]:
    """The answer for page `page` of a batch is no."""

    def value(before: Any) -> Any:
        def poor(*args: Any, **kwargs: Any) -> Any:
            found = before(*args, **kwargs).copy()
            found[page : page + 1] = False
            return found

        return poor

    return value


def _ask(rank: Rank) -> int:
    rank.flush()
    return rank.ask(PROMPT)


def _attach(disk: Path) -> Callable[[Rank], str]:
    return lambda rank: rank.attach(disk / "store")


def _compute(rank: Rank) -> int:
    found = rank.ask(PROMPT)
    rank.compute(PROMPT)
    return found


TIER = (lambda rank: rank.backend._tier, "locate")
GET = (lambda rank: rank.backend._tier, "get")


def _refusals(disk: Path) -> list[Callable[[Rank], tuple[str, bool]]]:
    """Attempts that must end on both ranks, because of one: (message, whether nothing is left)."""
    (disk / "file").write_bytes(b"x")

    def bad_drive(rank: Rank) -> tuple[str, bool]:
        return rank.attach(disk / ("file" if rank.number else "store")), _is_off(rank)

    def other_model(rank: Rank) -> tuple[str, bool]:
        return rank.attach(disk / "store", model_id=f"of rank {rank.number}"), _is_off(rank)

    def too_late(rank: Rank) -> tuple[str, bool]:
        with replaced(attaching, "SERVING_SECONDS", 2.0):
            time.sleep(4 * rank.number)
            return rank.attach(disk / "store"), _is_off(rank)

    def refused_at_the_end(rank: Rank) -> tuple[str, bool]:
        from tutti_sglang.integration.hicache import TuttiHiCacheStorage

        change = replaced(TuttiHiCacheStorage, "on_host_pools_registered", _fails(None)) if rank.number else None
        with change or replaced(rank, "number", rank.number):
            return rank.attach(disk / "store"), _is_off(rank)

    def busy(rank: Rank) -> tuple[str, bool]:
        """SGLang's handler of the request, on a scheduler of which one rank is not idle."""
        from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput
        from sglang.srt.managers.scheduler import Scheduler

        scheduler = SimpleNamespace(
            enable_hierarchical_cache=True,
            is_fully_idle=lambda: not rank.number,
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            tree_cache=rank.tree,
            page_size=PAGE,
        )
        text = rank.settings(disk / "store")
        request = AttachHiCacheStorageReqInput(
            hicache_storage_backend="tutti", hicache_storage_backend_extra_config_json=text
        )
        return Scheduler.attach_hicache_storage_wrapped(scheduler, request).message, _is_off(rank)

    def with_dcp(rank: Rank) -> tuple[str, bool]:
        with rank.parallel.override(attn_dcp_size=2):
            return rank.attach(disk / "store"), _is_off(rank)

    return [bad_drive, other_model, too_late, refused_at_the_end, busy, with_dcp]


def test_all_ranks_attach_or_none_and_go_on_with_what_all_have(model: Path, disk: Path) -> None:
    refused = _refusals(disk)
    slow = only_on(1, *TIER, _late(1.5))(_ask)
    poor = only_on(1, *TIER, _without(5))(_ask)
    short = only_on(1, *GET, _without(3))(_ask)
    failing = only_on(1, *TIER, _fails)(_ask)
    failing_get = only_on(0, *GET, _fails)(_ask)

    def lost(rank: Rank) -> int:
        rank.settle()
        if rank.number:
            rank.backend.clear()
        return _ask(rank)

    served = [_attach(disk), _compute, _ask, slow, poor, short, failing, failing_get, _ask, lost, _compute, _ask]
    answers = on_ranks(model, 2, *refused, *served, tp_size=2)
    for case, row in zip(refused, answers, strict=False):
        assert all(message and off for message, off in row), (case.__name__, row)
    (first, _), (second, _) = answers[0]
    assert "Rank 1 cannot attach" in first
    assert str(disk / "file") in first
    assert str(disk / "file") in second
    assert all("Rank 1 has another model" in message for message, _ in answers[1])
    assert all("Rank [1] did not attach the storage within 2 s" in message for message, _ in answers[2])
    assert "EIO" in answers[3][0][0]
    assert "not idle" in answers[4][0][0]
    assert all("DCP" in message for message, _ in answers[5])
    assert answers[6:] == [
        ["", ""],
        [0, 0],
        [WHOLE, WHOLE],
        [WHOLE, WHOLE],
        [5 * PAGE, 5 * PAGE],
        [3 * PAGE, 3 * PAGE],
        [0, 0],
        [0, 0],
        [WHOLE, WHOLE],
        [0, 0],
        [0, 0],
        [WHOLE, WHOLE],
    ]


@pytest.mark.parametrize("flags", [{"pp_size": 2}, {"tp_size": 2, "attn_cp_size": 2}], ids=["stages", "context"])
def test_ranks_with_stores_of_their_own_go_on_with_what_all_have(
    flags: dict[str, int], model: Path, disk: Path
) -> None:
    def other_stores(rank: Rank) -> str:
        return rank.attach(disk / f"rank-{rank.number}")

    def lost(rank: Rank) -> int:
        rank.detach()
        if rank.number:
            shutil.rmtree(disk / "rank-1")
        other_stores(rank)
        return _ask(rank)

    slow = only_on(1, *TIER, _late(1.5))(_ask)
    first_slow = only_on(0, *TIER, _late(1.5))(_ask)
    poor = only_on(1, *TIER, _without(5))(_ask)
    short = only_on(0, *GET, _without(3))(_ask)
    failing = only_on(1, *TIER, _fails)(_ask)
    cases = [other_stores, _compute, _ask, slow, first_slow, poor, short, failing, lost, _compute, _ask]
    answers = on_ranks(model, 2, *cases, **flags)
    tokens = [0, WHOLE, WHOLE, WHOLE, 5 * PAGE, 3 * PAGE, 0, 0, 0, WHOLE]
    assert answers == [["", ""], *([each, each] for each in tokens)]


def test_sglangs_fault_and_delay_injector_gives_no_wrong_byte_and_stops_nobody(model: Path, disk: Path) -> None:
    """Each rank fails and delays calls of its own; `ask` compares every byte that was restored."""

    def inject(rank: Rank) -> str:
        os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.02"
        os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.2"
        message = rank.attach(disk / "store")
        return message or type(rank.tree.cache_controller.storage_backend).__name__

    def requests(rank: Rank) -> list[int]:
        found = []
        for number in range(200):
            prompt = [number % 10, *PROMPT[1:]]
            found.append(rank.ask(prompt))
            rank.compute(prompt)
            rank.flush()
        return found

    (names, found) = on_ranks(model, 2, inject, requests, tp_size=2)
    assert names == ["HiCacheStorageFailureInjector"] * 2
    assert found[0] == found[1], "all ranks go on with the same prefix"
    assert {0, WHOLE} <= set(found[0])


def _objects(disk: Path) -> Callable[[Rank], int]:
    """How many the store's index holds, once each rank has written what it accepted."""

    def count(rank: Rank) -> int:
        rank.settle()
        rank.backend.flushed()
        torch.distributed.barrier()
        return objects(disk / "store")

    return count


def _update(rank: Rank) -> None:
    """New weights: what SGLang's hooks are told, in its order."""
    updating._suspend()
    rank.flush()
    updating._resume_after_flush(True, SimpleNamespace(weight_updater=SimpleNamespace(_session=None)))


def test_replicas_store_one_copy_and_find_it_after_new_weights_too(model: Path, disk: Path) -> None:
    slow = only_on(1, *TIER, _late(1.5))(_ask)
    cases = [_attach(disk), _compute, _objects(disk), _ask, slow, _update, _ask, _compute, _objects(disk), _ask]
    answers = on_ranks(model, 2, *cases, mla=True, tp_size=2)
    pages = WHOLE // PAGE
    assert answers == [
        ["", ""],
        [0, 0],
        [pages, pages],
        [WHOLE, WHOLE],
        [WHOLE, WHOLE],
        [None, None],
        [0, 0],
        [0, 0],
        [2 * pages, 2 * pages],
        [WHOLE, WHOLE],
    ]


def test_replicas_on_stores_of_their_own_are_written_to_each(model: Path, disk: Path) -> None:
    """As with two machines, or a drive for each rank: rank 0's pages are not where rank 1 looks."""

    def attach(rank: Rank) -> str:
        return rank.attach(disk / "{rank}")

    def together(rank: Rank) -> Any:
        rank.detach()
        message = rank.attach(disk / "store")
        return message, rank.tree.cache_controller.backup_skip

    def skips(rank: Rank) -> bool:
        return bool(rank.tree.cache_controller.backup_skip)

    cases = [attach, skips, _compute, _ask, _update, _compute, _ask, together]
    answers = on_ranks(model, 2, *cases, mla=True, tp_size=2)
    assert answers[1] == [False, False]
    assert answers[3] == answers[6] == [WHOLE, WHOLE]
    assert answers[7] == [("", False), ("", True)], "one store, one writer"


def test_storage_attached_to_a_tree_with_nodes_stores_no_page_that_claims_another_prefix(
    model: Path, disk: Path
) -> None:
    """What was computed before has no hashes until SGLang fills them in; what follows must be chained to them (B76)."""
    head, tail = PROMPT[: WHOLE // 2], PROMPT[::-1]

    def grow(rank: Rank) -> int:
        rank.compute(head + tail)
        rank.flush()
        return rank.ask(tail)

    cases = [lambda rank: rank.compute(head), _attach(disk), grow, lambda rank: rank.ask(head + tail)]
    before, attached, of_tail, of_all = on_ranks(model, 1, *cases)
    assert (before, attached, of_tail) == ([None], [""], [0])
    assert of_all == [0], "the head came before there was a storage, and SGLang does not store it later"


def test_a_scheduler_that_ends_closes_the_tier_before_its_host_memory_goes(model: Path, disk: Path) -> None:
    """Pages that were accepted are written then, and the memory that they came from is unpinned afterwards."""

    def end(rank: Rank) -> tuple[list[bool], int]:
        rank.compute(PROMPT)
        backend, closed = rank.backend, list[bool]()
        with replaced(rank.tree.host_pool_group, "destroy", lambda: closed.append(backend.closed)):
            rank.tree.release_host_resources()
        return closed, objects(disk / "store")

    assert on_ranks(model, 1, _attach(disk), end)[1] == [([True], WHOLE // PAGE)]


def test_new_weights_are_new_on_every_shard(model: Path, disk: Path) -> None:
    def weights(rank: Rank) -> str:
        return str(rank.backend.facts()["weights"])

    def attach_again(rank: Rank) -> str:
        rank.detach()
        return rank.attach(disk / "store")

    cases = [_attach(disk), _compute, weights, _update, weights, _ask, _compute, _ask, attach_again, weights, _ask]
    answers = on_ranks(model, 2, *cases, tp_size=2)
    assert answers[5] == [0, 0]
    assert answers[7] == [WHOLE, WHOLE]
    assert answers[8] == ["", ""]
    before, after, again = answers[2], answers[4], answers[9]
    assert before[0] == before[1] != after[0] == after[1]
    assert again == after, "what it serves is what it served before the detach"


@pytest.mark.parametrize("mla", [False, True], ids=["heads", "latent"])
def test_ranks_of_attention_dp_share_what_they_compute_alike(model: Path, disk: Path, mla: bool) -> None:
    """Each rank is a whole model for attention: one writes, the other finds it; both may write at once."""

    def first_computes(rank: Rank) -> int:
        rank.settle() if rank.number else rank.compute(PROMPT)
        return _objects(disk)(rank)

    def both_compute(rank: Rank) -> int:
        rank.flush()
        rank.compute(PROMPT[::-1])
        return _objects(disk)(rank)

    cases = [_attach(disk), first_computes, _ask, both_compute, _ask]
    answers = on_ranks(model, 2, *cases, mla=mla, tp_size=2, dp_size=2, enable_dp_attention=True)
    pages = WHOLE // PAGE
    assert answers[0] == ["", ""]
    assert answers[1] == [pages, pages]
    assert answers[2] == [WHOLE, WHOLE]
    assert answers[3] == [2 * pages, 2 * pages], "stored once, whoever wrote it"
    assert answers[4] == [WHOLE, WHOLE]


def test_what_ranks_do_not_agree_in_is_named() -> None:
    assert difference([{"weights": "a"}, {"weights": "a"}]) == ""
    assert "Rank 1 has another weights than rank 0: 'b' and not 'a'" in difference([{"weights": "a"}, {"weights": "b"}])
    assert "nothing" in difference([{"weights": "a"}, {}])


def test_a_process_alone_agrees_with_itself() -> None:
    attempt = ranks.Attempt("1", 1.0)
    attempt.agree({"weights": "a"})
    attempt.fail("no")
    assert ranks.key_store() is None
    assert ranks.shared_id() != ranks.shared_id()
