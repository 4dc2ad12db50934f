"""A real SGLang server on the CPU reference platform, as a process of its own, and the requests that tests send it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti_sglang.integration.cpu_model import built_in_model
from tutti_sglang.integration.cpu_server import cpu_environment, cpu_flags, write_site
from tutti_sglang.integration.launch import die_with_parent, free_port

START_SECONDS = 900.0
REQUEST_SECONDS = 240.0
STOP_SECONDS = 60.0
KEY = "secret"
ADMIN = ("--admin-api-key", KEY)
"""Flags of a server whose storage backend an administrator may attach and detach."""


@dataclass(frozen=True)
class Launch:
    """What makes two servers different; equal launches may share one server."""

    flags: tuple[str, ...] = ()
    model: Path | None = None
    environ: tuple[tuple[str, str], ...] = ()
    ranks: int = 1
    entry: tuple[str, ...] = ("-m", "sglang.launch_server")


def hicache(backend: str, *flags: str, extra: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """The flags of a hierarchical cache over a storage backend; `extra` is its extra config."""
    flags = ("--enable-hierarchical-cache", "--hicache-storage-backend", backend, *flags)
    return (*flags, "--hicache-storage-backend-extra-config", json.dumps(extra)) if extra is not None else flags


@dataclass(frozen=True)
class Reply:
    """An answer of /generate: the tokens, and how many tokens of the prompt came from where."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    device: int = 0
    host: int = 0
    storage: int = 0

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Reply":
        """From SGLang's JSON."""
        meta = answer["meta_info"]
        cached = meta.get("cached_tokens_details") or {}  # absent when nothing was cached
        where = {name: cached.get(name, 0) for name in ("device", "host", "storage")}
        return cls(answer["text"], tuple(answer["output_ids"]), meta["prompt_tokens"], **where)


class Server:
    """A server that can be stopped and started again. `folder` gets its log and the platform's distribution."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        """Start it and return when it serves. Raises AssertionError with the end of its log."""
        self.launch = launch
        self.log = folder / "log"
        self._site = write_site(folder / "site")
        self.start()

    def start(self) -> None:
        """Start a server that was stopped or killed, on a new port, with the same launch."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        model = self.launch.model or built_in_model()
        # No warm-up request: it would be the first one that a test's store sees.
        command = [sys.executable, *self.launch.entry, "--model-path", str(model), "--port", str(port)]
        command += ["--skip-server-warmup", *cpu_flags(), "--tp", str(self.launch.ranks), *self.launch.flags]
        environ = os.environ | {"HF_HUB_OFFLINE": "1"} | dict(self.launch.environ)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=cpu_environment(environ, self._site, self.launch.ranks),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self.call("/health", seconds=10)
                return
            late = time.monotonic() > deadline
            if late or self.process.poll() is not None:
                self.kill()
                state = f"did not serve within {START_SECONDS:.0f} s" if late else f"ended: {self.process.returncode}"
                raise AssertionError(f"the server {state}\n{self.log_text()[-6000:]}")
            time.sleep(0.3)

    @property
    def alive(self) -> bool:
        """Whether its main process runs."""
        return self.process.poll() is None

    def log_text(self) -> str:
        """All it has printed."""
        return self.log.read_text(errors="replace")

    def tracebacks(self) -> list[str]:
        """Each that it has printed, with what stands around it."""
        lines = self.log_text().splitlines()
        starts = [number for number, line in enumerate(lines) if "Traceback" in line]
        return ["\n".join(lines[max(0, start - 3) : start + 40]) for start in starts]

    def call(self, path: str, body: Any = None, *, method: str | None = None, seconds: float = REQUEST_SECONDS) -> str:
        """The text of an answer; with a body a POST of JSON. Raises HTTPError (an OSError) when it is not 200."""
        with urllib.request.urlopen(self.request(path, body, method), timeout=seconds) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        lines = [line for line in self.call("/metrics").splitlines() if re.match(rf"{name}[{{ ]", line)]
        return sum(float(line.split()[-1]) for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items()))

    def ask(self, method: str, path: str, body: Any = None, *, key: str = KEY) -> tuple[int, str]:
        """Status and text of an answer, whatever the status."""
        try:
            with urllib.request.urlopen(self.request(path, body, method, key), timeout=REQUEST_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def request(self, path: str, body: Any, method: str | None = None, key: str = KEY) -> urllib.request.Request:
        """What `call` and `ask` send; with a body a POST of JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return urllib.request.Request(self.url + path, data, headers, method=method)

    def attach(self, extra: Mapping[str, Any], backend: str = "tutti", **policies: str) -> tuple[int, str]:
        """Answer to an administrator's request; `policies`: prefetch_policy, write_policy as SGLang names them."""
        settings = {"hicache_storage_backend": backend, "hicache_storage_backend_extra_config_json": json.dumps(extra)}
        return self.ask("PUT", "/hicache/storage-backend", settings | policies)

    def detach(self) -> tuple[int, str]:
        """Answer to an administrator's request."""
        return self.ask("DELETE", "/hicache/storage-backend")

    def generate(self, prompt: str | list[int], tokens: int = 24, **fields: Any) -> Reply:
        """Greedy, always `tokens` long; `fields` are further ones of SGLang's request (lora_path, cache_salt …)."""
        return Reply.of(json.loads(self.call("/generate", _request(prompt, tokens, fields))))

    def generate_many(self, prompts: list[str], tokens: int = 24, **fields: Any) -> list[Reply]:
        """One request with several prompts, served as one batch where SGLang can."""
        return [Reply.of(answer) for answer in json.loads(self.call("/generate", _request(prompts, tokens, fields)))]

    def chat(self, text: str, tokens: int = 24, **fields: Any) -> dict[str, Any]:
        """The JSON of an OpenAI chat completion."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
        answer: dict[str, Any] = json.loads(
            self.call("/v1/chat/completions", body | {"return_cached_tokens_details": True} | fields)
        )
        return answer

    def flush(self) -> None:
        """Forget device and host cache. SGLang waits until nothing is being written, so all pages are in storage."""
        self.call("/flush_cache?timeout=60", method="POST")

    def stop(self) -> None:
        """As an operator would: SIGTERM to the main process, which drains and stops the others."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all of its processes; none holds a lock or a file any more when this returns."""
        deadline = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.poll()
                time.sleep(0.02)
        for queue in Path("/dev/shm").glob("sgl_shm_mq_*"):  # 25 MB for each group of ranks that could not clean up
            if not Path("/proc", queue.name.split("_")[3]).exists():
                queue.unlink(missing_ok=True)

    def restart(self) -> None:
        """Stop it and start it again."""
        self.stop()
        self.start()


class Servers:
    """At most one running server, since each takes two cores and a gigabyte; asking for another stops it."""

    def __init__(self, root: Path) -> None:
        self._root, self._count = root, 0
        self._server: Server | None = None

    def get(self, launch: Launch) -> Server:
        """The server of `launch`: the running one, if it is that and still alive, with what it remembers."""
        server = self._server
        if server is None or server.launch != launch or not server.alive:
            self.close()
            self._count += 1
            server = self._server = Server(launch, self._root / str(self._count))
        return server

    def close(self) -> None:
        """Kill the running server."""
        if self._server:
            self._server.kill()
            self._server = None


def _request(prompt: str | list[int] | list[str], tokens: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    by_ids = not isinstance(prompt, str) and isinstance(prompt[0], int)
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids" if by_ids else "text": prompt, "sampling_params": greedy, **fields}
