"""The entry point in processes of their own: what takes, what it costs, and what happens when a hook does not take."""

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.plugins.hook_registry import HookRegistry

from tutti_sglang.errors import HookError
from tutti_sglang.integration import flags, hooks, plugin
from tutti_sglang.integration.hook import Hook

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _scheduler() -> None:
    """Once: this import takes half a minute on a small machine, and the tests fork from here."""
    importlib.import_module("sglang.srt.managers.scheduler")


def _in_a_process(case: Callable[[], None]) -> None:
    """Run `case` in a fork, so that what it patches ends with it."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        said, code = io.StringIO(), 1
        with contextlib.suppress(BaseException), contextlib.redirect_stderr(said):
            try:
                case()
                code = 0
            except BaseException:
                traceback.print_exc()
        writer.send(said.getvalue())
        os._exit(code)
    said_there = reader.recv() if reader.poll(120) else "no answer"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, said_there


def _hook(method: str) -> Hook:
    """The first hook into a method of this name."""
    return next(hook for hook in hooks.HOOKS if hook.target.endswith(f".{method}"))


def _exchange(hook: Hook, other: Hook) -> None:
    hooks.HOOKS = tuple(other if each is hook else each for each in hooks.HOOKS)


def _run(code: str) -> None:
    """Run `code` in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def _register() -> None:
    plugin.register()
    HookRegistry.apply_hooks()


def test_every_hook_takes_in_a_scheduler_process() -> None:
    def case() -> None:
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        _register()
        assert hooks.missing() == []
        assert StorageBackendFactory._registry["tutti"]["loader"]().__name__ == "TuttiHiCacheStorage"

    _in_a_process(case)


def test_a_hook_that_does_not_take_stops_the_attach_by_name() -> None:
    def case() -> None:
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        hook = _hook("attach_storage_backend")
        _exchange(hook, hook._replace(target=hook.target + "_of_another_version"))
        _register()
        with pytest.raises(HookError, match=r"0\.5\.23.*attach_storage_backend_of_another_version"):
            StorageBackendFactory.create_backend("tutti", None, None)

    _in_a_process(case)


def test_a_target_with_other_parameters_is_not_trusted() -> None:
    def case() -> None:
        hook = _hook("flush_cache")
        _exchange(hook, hook._replace(parameters=("self", "force")))
        _register()
        assert hooks.missing() == ["sglang.srt.managers.scheduler.Scheduler.flush_cache"]

    _in_a_process(case)


def test_register_never_raises_and_says_why() -> None:
    def case() -> None:
        said = io.StringIO()
        logging.getLogger("tutti_sglang").addHandler(logging.StreamHandler(said))
        flags.register_resolution_hook = None  # as in an SGLang that has it no more
        plugin.register()
        assert "could not be registered" in said.getvalue()

    _in_a_process(case)


def test_a_dynamic_backend_hooks_a_scheduler_that_loads_no_plugins() -> None:
    # A process of its own: in this one a dynamic backend of another test may have hooked the scheduler already.
    code = """
        import sglang.srt.managers.scheduler
        from tutti_sglang.integration import hooks

        assert set(hooks.missing()) == {hook.target for hook in hooks.HOOKS}
        hooks.ensure()
        hooks.ensure()
        assert hooks.missing() == []
    """
    _run(code)


def test_other_processes_do_not_pay_for_the_schedulers_hooks() -> None:
    code = """
        import sys
        import sglang.srt.server_args
        from sglang.srt.plugins.hook_registry import HookRegistry
        from tutti_sglang.integration import plugin

        before = set(sys.modules)
        plugin.register()
        HookRegistry.apply_hooks()
        new = set(sys.modules) - before
        assert not {name for name in new if name.startswith(("sglang.srt.mem_cache", "sglang.srt.managers", "torch"))}
        assert "tutti_sglang.integration.hooks" not in sys.modules
    """
    _run(code)
