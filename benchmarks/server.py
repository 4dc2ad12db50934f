"""A real SGLang server of our own for a benchmark: with the tier over a directory, or the same without it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.client import Client
from tutti_sglang.integration.launch import free_port

START_SECONDS = 600.0
STOP_SECONDS = 60.0


class Server:
    """Starts at construction, on a free port of this machine; `log` gets what it prints."""

    def __init__(self, arguments: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
        """`arguments`: those of tutti_sglang.integration.launch; `environ`: instead of this process's."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "tutti_sglang.integration.launch", "--port", str(port), *arguments]
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)

    async def ready(self) -> None:
        """Return when it serves. Raises RuntimeError with the end of its log."""
        client = Client(self.url)
        deadline = time.monotonic() + START_SECONDS
        try:
            while not await client.ready():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"The server did not start: {self._log.read_text(errors='replace')[-3000:]}")
                await asyncio.sleep(0.5)
        finally:
            await client.close()

    def stop(self) -> None:
        """SIGTERM, as an operator would; whatever of its processes is left after a minute is killed."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
