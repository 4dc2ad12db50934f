"""Every way in which SGLang changes weights, through its own updater on two ranks: old KV is never found again."""

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from tests.integration.gloo import PAGE, Rank, on_ranks
from tutti_sglang.integration.cpu_model import built_in_model, write_model

PROMPT = [3 + n % 7 for n in range(4 * PAGE)]
WHOLE = len(PROMPT)
ROUTES = ("disk", "distributed", "tensor", "ipc")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _scheduler() -> None:
    """Once: this import takes half a minute on a small machine, and the ranks fork from here."""
    importlib.import_module("sglang.srt.managers.scheduler")


class Scheduler(SimpleNamespace):
    """What the weight updater, the flush and the version's record need of a scheduler, around a rank's real tree.

    Their code is SGLang's; the worker only says yes, or no where `fails` names the way.
    """

    def __init__(self, rank: Rank) -> None:
        from sglang.srt.managers import scheduler
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

        real = scheduler.Scheduler
        super().__init__(rank=rank, tree_cache=rank.tree, idle=True, fails=False, waiting_queue=[], chunked_req=None)
        self.flush_cache = MethodType(real.flush_cache, self)
        self.record_weight_version_change = MethodType(real.record_weight_version_change, self)
        self.weight_updater = SchedulerWeightUpdaterManager(
            tp_worker=self,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self.flush_cache,
            is_fully_idle=self.is_fully_idle,
            scheduler=self,
        )

    _engine_paused = False
    hisparse_coordinator = draft_worker = None
    running_batch = SimpleNamespace(reqs=[])
    metrics_reporter = SimpleNamespace(reset_metrics=lambda: None, is_stats_logging_rank=False)
    grammar_manager = SimpleNamespace(clear=lambda: None)
    req_to_token_pool = SimpleNamespace(clear=lambda: None, reset_aux_cache_allocator=lambda: None)

    def is_fully_idle(self, **_: Any) -> bool:
        return self.idle

    def collect_inflight_reqs(self) -> set[Any]:
        return set()

    @property
    def token_to_kv_pool_allocator(self) -> Any:
        return self.rank.allocator

    @property
    def model_runner(self) -> Any:
        return SimpleNamespace(weight_updater=self)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("target", self.model_runner)]

    def deserialize_own_rank(self, tensors: Any) -> Any:
        return tensors

    def receive_weights_from_distributed(self, **_: Any) -> Any:
        return []

    def _answer(self, *_: Any, **__: Any) -> tuple[bool, str]:
        return not self.fails, "as the worker says"

    update_weights_from_disk = update_weights_from_tensor = update_weights_from_ipc = _answer
    load_weights_from_distributed = begin_weight_update = end_weight_update = _answer

    def update(self, route: str, path: Path | str = "", *, end: bool = True, **fields: Any) -> bool:
        """As SGLang's handlers of the requests do; whether it says that all went well."""
        from sglang.srt.managers import io_struct as io

        updater = self.weight_updater
        requests: dict[str, tuple[Any, dict[str, Any]]] = {
            "disk": (io.UpdateWeightFromDiskReqInput, {"model_path": str(path)}),
            "distributed": (io.UpdateWeightsFromDistributedReqInput, {"names": [], "dtypes": [], "shapes": []}),
            "tensor": (io.UpdateWeightsFromTensorReqInput, {"serialized_named_tensors": []}),
            "ipc": (io.UpdateWeightsFromIPCReqInput, {"zmq_handles": {}}),
        }
        kind, needed = requests[route]
        session = route in ("distributed", "tensor")
        if session:
            updater.begin_weight_update(io.BeginWeightUpdateReqInput())
        answer = getattr(updater, f"update_weights_from_{route}")(kind(**needed, **fields))
        if session and end:
            self.end()
        return bool(answer.success)

    def end(self) -> None:
        """Close the session of an update."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self.weight_updater.end_weight_update(EndWeightUpdateReqInput())


def _cycle(scheduler: Scheduler) -> tuple[int, int]:
    """A prompt before and after it was computed with the weights of now: what came from the storage."""
    rank = scheduler.rank
    rank.flush()
    first = rank.ask(PROMPT)
    rank.flush()
    rank.compute(PROMPT)
    rank.flush()
    return first, rank.ask(PROMPT)


NEW = (0, WHOLE)
OFF = (0, 0)


def _every_way(rank: Rank, newer: Path) -> list[Any]:
    """Ways that did not end with a miss of the old and a hit of the new."""
    scheduler, odd = Scheduler(rank), []
    _cycle(scheduler)
    seeds, latest = itertools.count(), ""
    ways = [("new", "at once"), ("same", "at once"), ("none", "at once"), ("same", "later"), ("none", "refused")]
    for route, (version, flush) in itertools.product(ROUTES, ways):
        seed = next(seeds)
        latest = f"v{seed}" if version == "new" else latest
        named = latest if version != "none" else None
        write_model(newer, seed=seed)
        scheduler.idle = flush != "refused"
        done = scheduler.update(route, newer, flush_cache=flush != "later", weight_version=named)
        between = NEW if flush == "at once" else _cycle(scheduler)
        scheduler.idle = True
        if flush != "at once":
            scheduler.flush_cache()
        seen = (done == (flush != "refused"), between == (NEW if flush == "at once" else OFF), _cycle(scheduler))
        if seen != (True, True, NEW):
            odd.append((route, version, flush, seen))
    return odd


def _odd_ways(rank: Rank, newer: Path) -> dict[str, Any]:
    """Updates that fail, are open, or that SGLang sees only the ends of; each with what it must come to."""
    scheduler, seen = Scheduler(rank), {}
    scheduler.fails = True
    for route in ROUTES:
        scheduler.update(route, newer, weight_version="failed")
        seen[f"{route} fails, not flushed"] = (_cycle(scheduler), OFF)
        scheduler.flush_cache()
        seen[f"{route} fails, flushed"] = (_cycle(scheduler), NEW)
    scheduler.fails = False
    scheduler.update("tensor", end=False)
    seen["flushed inside an open session"] = (_cycle(scheduler), OFF)
    scheduler.end()
    seen["the session ended"] = (_cycle(scheduler), NEW)
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

    scheduler.weight_updater.begin_weight_update(BeginWeightUpdateReqInput())
    scheduler.flush_cache()
    scheduler.end()  # written from elsewhere, after the flush
    seen["written from elsewhere"] = (_cycle(scheduler), OFF)
    scheduler.flush_cache()
    seen["written from elsewhere, flushed"] = (_cycle(scheduler), NEW)
    scheduler.record_weight_version_change("told by name alone")
    seen["another version told"] = (_cycle(scheduler), OFF)
    scheduler.flush_cache()
    seen["another version told, flushed"] = (_cycle(scheduler), NEW)
    scheduler.record_weight_version_change("told by name alone")
    seen["the same version told"] = (_cycle(scheduler), (WHOLE, WHOLE))
    write_model(newer, seed=77)
    scheduler.update("disk", newer)
    seen["files"] = (_cycle(scheduler), NEW)
    scheduler.update("tensor")
    seen["others"] = (_cycle(scheduler), NEW)
    scheduler.update("disk", newer)
    seen["the same files again"] = (_cycle(scheduler), (WHOLE, WHOLE))
    write_model(newer, seed=78)
    scheduler.update("disk", newer)
    seen["other files over the same path"] = (_cycle(scheduler), NEW)
    return {name: pair for name, pair in seen.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("mla", [False, True], ids=["shards", "replicas"])
def test_no_way_of_new_weights_finds_old_kv(mla: bool, tmp_path: Path, disk: Path) -> None:
    def on_its_own(way: Callable[[Rank, Path], Any]) -> Callable[[Rank], Any]:
        def case(rank: Rank) -> Any:
            newer = tmp_path / f"newer-{rank.number}"
            newer.mkdir(exist_ok=True)
            return way(rank, newer)

        case.__name__ = way.__name__
        return case

    cases = [lambda rank: rank.attach(disk / "store", max_size="1GiB"), on_its_own(_odd_ways), on_its_own(_every_way)]
    attached, odd, *every = on_ranks(built_in_model(), 2, *(cases[:2] if mla else cases), mla=mla, tp_size=2)
    assert attached == ["", ""]
    assert odd == [{}, {}]
    assert every == ([] if mla else [[[], []]])
