"""`tutti demo`: a conversation outlives its server. The real server, the real tier, no GPU needed."""

import contextlib
import http.client
import json as jsonlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from tutti_sglang.cli.console import FOUND, GOOD, Answer, answer
from tutti_sglang.cli.options import Json
from tutti_sglang.errors import TuttiError
from tutti_sglang.integration.launch import free_port

TURNS = 3
REPLY = 8  # tokens
START_SECONDS, STOP_SECONDS, REQUEST_SECONDS = 300.0, 60.0, 300.0
_LOG_END = 2000


class Turn(NamedTuple):
    """One request: seconds to the first token; tokens of the prompt, and how many of them came from storage."""

    what: str
    seconds: float
    prompt: int
    storage: int


def demo(
    words: Annotated[int, typer.Option(min=100, help="Length of the document that the chat is about.")] = 1200,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the store and the server's log.")] = False,
    json: Json = False,
) -> None:
    """Chat with a server about a long document, stop it, start it again, and go on: what is read need not be computed.

    Example: tutti demo
    """

    def act(console: Console) -> Answer:
        with _folder(keep) as folder:
            console.print(f"A server with the tier, its KV cache in {folder / 'store'} (log: {folder / 'log'})")
            turns = _story(console, folder, words)
        _picture(console, turns)
        restored = next(turn for turn in turns if turn.what == "after the restart")
        code = GOOD if restored.storage else FOUND
        return Answer([turn._asdict() for turn in turns], code)

    answer("demo", json, act)


@contextlib.contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    """Not under /tmp, which may be memory."""
    folder = Path(tempfile.mkdtemp(prefix="tutti-demo-", dir="/var/tmp"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _story(console: Console, folder: Path, words: int) -> list[Turn]:
    turns: list[Turn] = []
    chat = [{"role": "user", "content": f"{_document(0, words)} What does it say?"}]

    def ask(url: str, what: str, messages: list[dict[str, str]]) -> str:
        turn, reply = _ask(url, what, messages)
        turns.append(turn)
        console.print(f"  {what}: {turn.prompt} tokens, {turn.storage} from storage, {turn.seconds:.2f} s to the first")
        return reply

    with _server(console, folder) as url:
        ask(url, "warm-up", [{"role": "user", "content": "Good morning."}])
        for turn in range(TURNS):
            reply = ask(url, "first turn" if not turn else f"turn {turn + 1}", chat)
            chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"And point {turn + 1}?"}]
    with _server(console, folder) as url:
        ask(url, "warm-up", [{"role": "user", "content": "Good morning again."}])
        ask(url, "after the restart", chat)
        other = [{"role": "user", "content": _document(1, words) + chat[0]["content"][-20:]}, *chat[1:]]
        ask(url, "the same length, never seen", other)
    return turns


def _document(seed: int, words: int) -> str:
    return " ".join(f"item{(seed * 7919 + number * 104729) % 9973}" for number in range(words))


@contextlib.contextmanager
def _server(console: Console, folder: Path) -> Iterator[str]:
    """The server of `make serve`, ready; stopped at the end as a user stops it, so that it writes what it accepted."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "tutti_sglang.integration.launch", "--port", str(port)]
    command += ["--store", str(folder / "store"), "--skip-server-warmup"]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with console.status("starting the server"):
                _wait(process, url, folder / "log")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{url}/health", timeout=5),
        ):
            return
        time.sleep(0.5)
    end = log.read_text(errors="replace")[-_LOG_END:]
    raise TuttiError(f"The server did not start; the end of its log:\n{end}", "Run: tutti doctor")


def _ask(url: str, what: str, messages: list[dict[str, str]]) -> tuple[Turn, str]:
    """A streamed chat completion; the clock stops at the first chunk with text."""
    body = {"messages": messages, "max_tokens": REPLY, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}, "return_cached_tokens_details": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", jsonlib.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, reply, prompt, storage = time.perf_counter(), 0.0, "", 0, 0
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer_:
        for line in answer_:
            if not line.startswith(b"data: {"):
                continue
            chunk = jsonlib.loads(line[6:])
            for choice in chunk.get("choices", ()):
                text = choice["delta"].get("content") or ""
                if text and not first:
                    first = time.perf_counter() - began
                reply += text
            prompt = (chunk.get("usage") or {}).get("prompt_tokens", prompt)
            details = (chunk.get("sglext") or {}).get("cached_tokens_details") or {}
            storage = max(storage, details.get("storage") or 0)
    return Turn(what, first, prompt, storage), reply


def _picture(console: Console, turns: list[Turn]) -> None:
    """Bars: the turn after the restart beside one that had to be computed."""
    shown = [turn for turn in turns if turn.what in ("after the restart", "the same length, never seen")]
    longest = max(turn.seconds for turn in shown)
    table = Table("time to the first token", "", "", show_edge=False)
    for turn in shown:
        bar = "█" * max(1, round(40 * turn.seconds / longest))
        table.add_row(turn.what, bar, f"{turn.seconds:.2f} s, {turn.storage} of {turn.prompt} tokens from storage")
    console.print(table)
