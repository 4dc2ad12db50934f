"""A state machine: several handles put, get, clear, crash, reopen and verify on drives that fail and files that are
damaged, against a model of what was put."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, precondition, rule

from tests.store.kit import MIB, Weather, eventually, get, lookup, namespace, open_store, put, segment_files, value
from tutti_sglang.store import ObjectStore
from tutti_sglang.testing.faults import EVERY_BLOCK, READS, WRITES, Fault, FaultPlan

PAGES = st.lists(st.integers(0, 80), min_size=1, max_size=20, unique=True)
MODELS = st.sampled_from("ab")
HANDLES_MAX = 3
SALT = {"a": 0, "b": 10_000}
"""Equal keys of two namespaces have different contents."""


class Handle:
    """What one process has: a store, its namespaces, the weather of its drives."""

    def __init__(self, homes: list[Path]) -> None:
        self.weather = Weather()
        self.store: ObjectStore = open_store(*homes, seam=self.weather, max_size=2 * MIB)
        self.spaces = {model: self.store.attach(namespace(model)) for model in "ab"}

    def put(self, model: str, pages: list[int]) -> list[bool]:
        return put(self.store, self.spaces[model], *pages, salt=SALT[model])

    def get(self, model: str, pages: list[int]) -> list[bool]:
        """What is delivered is compared with what was put."""
        return get(self.store, self.spaces[model], *pages, salt=SALT[model])

    def lookup(self, model: str, pages: list[int]) -> list[bool]:
        return lookup(self.store, self.spaces[model], *pages)

    @property
    def fair(self) -> bool:
        """Nothing is wrong with its drives, and nothing was."""
        return self.weather.plan is None and self.store.stats().drives_in_service == 2


class StoreMachine(RuleBasedStateMachine):
    """`put`: for each namespace the pages that anybody ever put and nobody cleared since; nothing else may be there."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.disk = Path(tempfile.mkdtemp(prefix="tutti-", dir="/var/tmp"))
        self.homes = [self.disk / "a", self.disk / "b"]
        self.put: dict[str, set[int]] = {"a": set(), "b": set()}
        self.handles_open: list[Handle] = []

    def teardown(self) -> None:
        try:
            for handle in self.handles_open:
                handle.weather.plan = None
                assert value(handle.store, "tutti_call_errors") == 0
                assert handle.store.close()
            self._look_at_the_whole()
        finally:
            shutil.rmtree(self.disk)

    def _look_at_the_whole(self) -> None:
        handle = Handle(self.homes)
        report = handle.store.verify(repair=True)
        assert (report.lost, report.double, report.stray) == (0, 0, 0), report
        report = handle.store.verify()
        assert report.good, report
        for model in "ab":
            claimed = handle.lookup(model, list(range(81)))
            assert handle.get(model, list(range(81))) == claimed
            assert {page for page in range(81) if claimed[page]} <= self.put[model]
        assert handle.store.close()

    @precondition(lambda self: len(self.handles_open) < HANDLES_MAX)
    @rule(target=handles)
    def open_a_handle(self) -> Handle:
        handle = Handle(self.homes)
        self.handles_open.append(handle)
        return handle

    @rule(handle=consumes(handles))
    def close_a_handle(self, handle: Handle) -> None:
        handle.weather.plan = None
        self.handles_open.remove(handle)
        assert handle.store.close()

    @rule(handle=consumes(handles))
    def crash(self, handle: Handle) -> None:
        """Its lock goes with its process; what it accepted is lost, and what it leased is for others to reclaim."""
        store = handle.store
        handle.weather.plan = None
        self.handles_open.remove(handle)
        store._room.leave = lambda: None  # type: ignore[method-assign]
        os.close(store._parts.owners._fd)
        store._parts.owners._fd = -1
        store.close(0)
        assert eventually(lambda: store.close(1))

    @rule(handle=handles, model=MODELS, pages=PAGES)
    def put_pages(self, handle: Handle, model: str, pages: list[int]) -> None:
        self.put[model].update(pages)
        assert len(handle.put(model, pages)) == len(pages)

    @rule(handle=handles, model=MODELS, pages=PAGES)
    def get_pages(self, handle: Handle, model: str, pages: list[int]) -> None:
        found = handle.get(model, pages)
        assert all(page in self.put[model] for page, there in zip(pages, found, strict=True) if there)

    @rule(handle=handles, model=MODELS, pages=PAGES)
    def look_up_pages(self, handle: Handle, model: str, pages: list[int]) -> None:
        claimed = handle.lookup(model, pages)
        assert all(page in self.put[model] for page, there in zip(pages, claimed, strict=True) if there)

    @precondition(lambda self: len(self.handles_open) == 1)
    @rule(handle=handles, model=MODELS, pages=PAGES)
    def what_a_lonely_handle_stores_is_there(self, handle: Handle, model: str, pages: list[int]) -> None:
        """Nobody else evicts, and fewer pages than the store holds were put."""
        if not handle.fair:
            return
        self.put[model].update(pages)
        assert eventually(
            lambda: all(handle.put(model, pages)) and handle.store.drain(8) and all(handle.get(model, pages))
        )

    @precondition(lambda self: len(self.handles_open) == 1)
    @rule(handle=handles, model=MODELS)
    def clear(self, handle: Handle, model: str) -> None:
        handle.weather.plan = None
        handle.store.clear(handle.spaces[model])
        self.put[model].clear()
        assert not any(handle.lookup(model, list(range(81))))
        assert not any(handle.get(model, list(range(81))))

    @rule(handle=handles)
    def drain(self, handle: Handle) -> None:
        assert handle.store.drain(20)

    @rule(
        handle=handles,
        seed=st.integers(0, 99),
        rate=st.sampled_from([50, 500]),
        operations=st.sampled_from([READS, WRITES]),
    )
    def bad_weather(self, handle: Handle, seed: int, rate: int, operations: int) -> None:
        """Some blocks of the drives fail, tear or answer with nothing, as this handle sees them."""
        kinds = (Fault.ERROR, Fault.ZERO, Fault.SHORT, Fault.TORN)
        handle.weather.plan = FaultPlan(dict.fromkeys(kinds, EVERY_BLOCK // rate), seed=seed, operations=operations)

    @rule(handle=handles)
    def good_weather(self, handle: Handle) -> None:
        handle.weather.plan = None

    @rule(seed=st.integers(0, 999))
    def damage_a_file(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        files = [file for home in self.homes if home.exists() for file in segment_files(home)]
        if not files:
            return
        with contextlib.suppress(FileNotFoundError), open(files[rng.integers(len(files))], "r+b") as handle:
            handle.seek(int(rng.integers(0, MIB - 512)))
            handle.write(rng.bytes(512))

    @rule(handle=handles)
    def verify(self, handle: Handle) -> None:
        report = handle.store.verify()
        assert (report.lost, report.double, report.stray) == (0, 0, 0), report

    @rule(handle=handles)
    def repair(self, handle: Handle) -> None:
        report = handle.store.verify(repair=True)
        assert (report.lost, report.double, report.stray) == (0, 0, 0), report


StoreMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
test_a_store_is_what_was_put_into_it = StoreMachine.TestCase
