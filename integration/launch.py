"""`make serve`: a real SGLang server with the tier, on the GPU if there is one, else on the CPU reference platform.

python -m tutti_sglang.integration.launch [--model PATH] [--store DIR] [--without-tier] [further SGLang flags]
"""

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from tutti_sglang.integration.cpu_model import built_in_model
from tutti_sglang.integration.cpu_server import cpu_environment, cpu_flags, write_site

DEFAULT_STORE = Path("~/.cache/tutti-sglang/store")
DEFAULT_STORE_SIZE = "4GiB"
STOP_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


class Launch(NamedTuple):
    """How the server is started, and what to tell the user about it."""

    command: list[str]
    environ: dict[str, str]
    about: str


def main(arguments: list[str] | None = None) -> int:
    """Run the server until it ends or the user presses Ctrl-C; returns its exit status."""
    options, flags = _parse(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="tutti-sglang-") as scratch, contextlib.suppress(KeyboardInterrupt):
        launch = plan(options, flags, gpu=_has_gpu(), site=Path(scratch))
        print(f"tutti: {launch.about}\n$ {shlex.join(launch.command)}", flush=True)
        return _serve(launch, f"http://{options.host}:{options.port}")
    return 0


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="tutti_sglang.integration.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="a folder or a name that SGLang knows (default: a built-in model of 7 MB)")
    parser.add_argument(
        "--store", type=Path, default=DEFAULT_STORE, help="where the KV cache is kept (default: %(default)s)"
    )
    parser.add_argument("--without-tier", action="store_true", help="the same server without the tier, to compare")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp", "--tp-size", "--tensor-parallel-size", type=int, default=1)
    # Without the separator that people type before SGLang's flags: --port and --tp count on either side of it.
    return parser.parse_known_args([word for word in arguments if word != "--"])


def plan(options: argparse.Namespace, flags: list[str], *, gpu: bool, site: Path) -> Launch:
    """The command and environment for these options; the CPU platform's distribution goes into `site`."""
    model = options.model or str(built_in_model())
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--host", options.host, "--port", str(options.port), "--tp", str(options.tp)]
    command += ["--enable-metrics", "--uvicorn-access-log-exclude-prefixes", "/metrics", "/health"]
    about = f"{options.model or 'the built-in model'} on the {'GPU' if gpu else 'CPU'}"
    environ: Mapping[str, str] = os.environ
    if not gpu:
        command += cpu_flags(built_in=not options.model)
        environ = cpu_environment(environ, write_site(site), options.tp)
    if not options.without_tier:
        command += ["--enable-hierarchical-cache", "--hicache-storage-backend", "tutti"]
        if not any(flag.startswith("--hicache-storage-backend-extra-config") for flag in flags):
            command += ["--hicache-storage-backend-extra-config", json.dumps(_settings(options.store))]
            about += f", its KV cache in {options.store}"
    if not options.model:
        environ = {**environ, "HF_HUB_OFFLINE": "1"}
    return Launch([*command, *flags], dict(environ), about)


def _settings(store: Path) -> dict[str, object]:
    """The user's own drive may be filled; a folder in the home directory may not."""
    directory = store.expanduser().absolute()
    directory.mkdir(parents=True, exist_ok=True)
    size = {"max_size": DEFAULT_STORE_SIZE} if store == DEFAULT_STORE else {}
    return {"storage_dirs": [str(directory)], **size}


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _serve(launch: Launch, url: str) -> int:
    """The server gets its own process group: Ctrl-C would kill its schedulers before they could drain their writes."""
    process = subprocess.Popen(launch.command, env=launch.environ, process_group=0, preexec_fn=die_with_parent)
    try:
        threading.Thread(target=_report, args=(process, url), daemon=True).start()
        return process.wait()
    except KeyboardInterrupt:
        print("\ntutti: stopping the server (Ctrl-C again to kill it)", flush=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(STOP_SECONDS)
        return 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """In a child before exec: a server must not outlive a launcher or a test that was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _report(process: subprocess.Popen[bytes], url: str) -> None:
    """Once the server is ready say what to try, then after each request where its prompt came from."""
    seen: Counter[str] | None = None
    while process.poll() is None:
        time.sleep(1)
        with contextlib.suppress(OSError, http.client.HTTPException):
            if seen is None:
                _get(f"{url}/health")
                seen = served(_get(f"{url}/metrics"))
                print(try_this(url), flush=True)
                continue
            now = served(_get(f"{url}/metrics"))
            if now["requests"] > seen["requests"]:
                print(f"tutti: {describe(now - seen)}", flush=True)
                seen = now


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def try_this(url: str) -> str:
    """What the user may type; each line works as it stands."""
    content = "'\"$(seq -s ' ' 400)\"'"
    body = f'{{"messages": [{{"role": "user", "content": "Sort: {content}"}}], "max_tokens": 32, "temperature": 0, '
    body += '"return_cached_tokens_details": true}'
    return f"""
tutti: ready. Ask, let SGLang forget, ask again (or press Ctrl-C, start this server again, and ask again):

  curl -sw '\\n' {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'
  curl -s -X POST '{url}/flush_cache?timeout=30'

The answer's sglext.cached_tokens_details says how many tokens of the prompt came from "storage", "host" and "device"
memory; the line that this launcher prints after each request says the same.
"""


def served(metrics: str) -> Counter[str]:
    """Totals in SGLang's metrics: requests, prompt, and cached tokens by device, host and storage."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            match sample.name:
                case "sglang:num_requests_total":
                    totals["requests"] += int(sample.value)
                case "sglang:prompt_tokens_total":
                    totals["prompt"] += int(sample.value)
                case "sglang:cached_tokens_total":
                    totals[sample.labels["cache_source"]] += int(sample.value)
    return totals


def describe(change: Counter[str]) -> str:
    """One line about what was served since the last one."""
    computed = change["prompt"] - change["storage"] - change["host"] - change["device"]
    requests = "1 request" if change["requests"] == 1 else f"{change['requests']} requests"
    return (
        f"{requests}, {change['prompt']} prompt tokens: {change['storage']} from storage, {change['host']} from host "
        f"memory, {change['device']} from the device, {computed} computed"
    )


if __name__ == "__main__":
    sys.exit(main())
