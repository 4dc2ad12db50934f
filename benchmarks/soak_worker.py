"""The processes of the soak, and how its parent asks them."""

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.soaker import PATIENCE, Case, Soaker


class Worker:
    """A Soaker in a process of its own. `ask` and `answer` raise RuntimeError with that process's own traceback."""

    def __init__(self, case: Case) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.soaker", "sglang.srt.mem_cache.pool_host.mha"])
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, case), daemon=True)
        self._process.start()
        end.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid
        return self._process.pid

    def ask(self, verb: str, *arguments: Any) -> None:
        """Have it call a method of its Soaker; `answer` waits for it."""
        self._pipe.send((verb, arguments))

    def answer(self) -> Any:
        """What the method returned."""
        if not self._pipe.poll(2 * PATIENCE):
            raise RuntimeError("a worker does not answer")
        try:
            good, found = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"a worker died: exit code {self._process.exitcode}") from None
        if not good:
            raise RuntimeError(found)
        return found

    def call(self, verb: str, *arguments: Any) -> Any:
        """Ask, and wait for the answer."""
        self.ask(verb, *arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, case: Case) -> None:
    from sglang.srt.runtime_context import get_parallel

    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    try:
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, **ranks):
            soaker = Soaker(case)
            while True:
                verb, arguments = pipe.recv()
                pipe.send((True, getattr(soaker, verb)(*arguments)))
    except EOFError:
        pass
    except Exception:  # noqa: BLE001 — the parent reports it
        pipe.send((False, traceback.format_exc()))
