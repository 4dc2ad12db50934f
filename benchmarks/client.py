"""A streaming client of SGLang's /generate: time to first token, gaps between tokens, origin of the prompt's KV."""

import asyncio
import random
import time
from collections.abc import Awaitable, Iterable
from typing import Any

import aiohttp
import msgspec

FIRST_ID, LAST_ID = 32, 126  # token ids of any vocabulary; ASCII where a token is a byte
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=600)


class Sample(msgspec.Struct):
    """One request. Times in seconds, `begun` on a clock of this machine; `device`, `host` and `storage` are tokens of
    the prompt that were not computed."""

    prompt: int
    ttft: float
    gaps: list[float]
    device: int
    host: int
    storage: int
    reply: list[int]
    begun: float = 0.0


class Client:
    """A session with one server. Raises RuntimeError for an answer that is not 200."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(timeout=TIMEOUT)

    async def generate(self, prompt: list[int] | str, tokens: int) -> Sample:
        """Greedy, exactly `tokens` tokens."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        asked = {"text" if isinstance(prompt, str) else "input_ids": prompt}
        body = {**asked, "sampling_params": sampling, "stream": True}
        start = last = time.perf_counter()
        arrivals: list[float] = []
        reply: list[int] = []
        meta: dict[str, Any] = {}
        async with self._session.post(f"{self.url}/generate", json=body) as answer:
            await _check(answer)
            async for line in answer.content:
                chunk = _event(line)
                if chunk is None:
                    continue
                meta = chunk["meta_info"]
                now = time.perf_counter()
                new = meta["completion_tokens"] - len(arrivals)
                if new > 0:
                    arrivals += [now - (last if arrivals else start)] + [0.0] * (new - 1)
                    last = now
                # Cumulative, unless the server runs with --incremental-streaming-output.
                found = chunk["output_ids"]
                reply = found if len(found) == meta["completion_tokens"] else reply + found
        details = meta.get("cached_tokens_details") or {}
        device, host, storage = (int(details.get(tier) or 0) for tier in ("device", "host", "storage"))
        return Sample(meta["prompt_tokens"], arrivals[0], arrivals[1:], device, host, storage, reply, start)

    async def flush(self) -> None:
        """Empty device and host tier, once what is being written to storage is there."""
        async with self._session.post(f"{self.url}/flush_cache", params={"timeout": "60"}) as answer:
            await _check(answer)

    async def ready(self) -> bool:
        """Whether the server answers."""
        try:
            async with self._session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=30)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()


def tokens(seed: str, count: int) -> list[int]:
    """`count` token ids that only `seed` decides."""
    return random.Random(seed).choices(range(FIRST_ID, LAST_ID + 1), k=count)


async def at_most(parallel: int, work: Iterable[Awaitable[Sample]]) -> list[Sample]:
    """Run `parallel` at once; their samples in order."""
    room = asyncio.Semaphore(parallel)

    async def one(each: Awaitable[Sample]) -> Sample:
        async with room:
            return await each

    return list(await asyncio.gather(*map(one, work)))


async def together(work: Iterable[Awaitable[list[Sample]]]) -> list[Sample]:
    """Run all at once; their samples in order."""
    return [sample for samples in await asyncio.gather(*work) for sample in samples]


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RuntimeError(f"{answer.url} answered {answer.status}: {(await answer.text())[:500]}")


def _event(line: bytes) -> dict[str, Any] | None:
    data = line.removeprefix(b"data: ").strip()
    if data == line.strip() or data == b"[DONE]":
        return None
    chunk: dict[str, Any] = msgspec.json.decode(data)
    if "error" in chunk:
        raise RuntimeError(f"The server answered {chunk['error']}")
    return chunk
