"""One node: a GPU with its queue, and the tiers that its KV goes through, from the fastest to the largest."""

from collections import OrderedDict
from typing import NamedTuple

from benchmarks.simulation.models import Gpu, Model, Tier
from benchmarks.simulation.traffic import BLOCK, Arrival


class Policy(NamedTuple):
    """`preload`: a queued request's blocks are read while it waits; `break_even`: what is slower to load than to
    compute is computed."""

    preload: bool = False
    break_even: bool = False


class Served(NamedTuple):
    """One request: seconds to the first token, of those waiting in the queue, and with an idle GPU (bubble); tokens of
    its prompt, and by tier those that came from there."""

    ttft: float
    queued: float
    bubble: float
    tokens: int
    hits: dict[str, int]


class Kept:
    """Blocks in one tier, least recently used first; a prompt is touched from its tail to its head."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def leading(self, blocks: tuple[int, ...], start: int) -> int:
        """How many blocks from `start` on are here, up to the first that is not."""
        end = start
        while end < len(blocks) and blocks[end] in self._blocks:
            end += 1
        return end - start

    def touch(self, blocks: tuple[int, ...]) -> int:
        """Keep them; how many were new."""
        new = 0
        for block in reversed(blocks):
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                new += 1
                self._blocks[block] = None
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return new


LOAD = Policy()


def room(model: Model, tier: Tier, nodes: int = 1) -> Kept:
    """An empty cache of the tier's size on so many nodes."""
    return Kept(int(nodes * tier.capacity // (model.kv_bytes * BLOCK)))


class Node:
    """Serves requests in the order of their arrival; replies are generated in the gaps."""

    def __init__(
        self, model: Model, gpu: Gpu, tiers: tuple[Tier, ...], policy: Policy = LOAD, peers: Kept | None = None
    ) -> None:
        """`peers`: what all nodes together keep, which is then what the last tier holds."""
        self._model, self._gpu, self._tiers, self._policy = model, gpu, tiers, policy
        self.kept = [room(model, tier) for tier in tiers]
        if peers:
            self.kept[-1] = peers
        self.free_at = 0.0
        self._tier_free = [0.0] * len(tiers)
        self._written = [0.0] * len(tiers)
        self._read = [0.0] * len(tiers)

    @property
    def written(self) -> dict[str, float]:
        """Bytes written, by tier."""
        return {tier.name: nbytes for tier, nbytes in zip(self._tiers, self._written, strict=True)}

    @property
    def read(self) -> dict[str, float]:
        """Bytes read, by tier."""
        return {tier.name: nbytes for tier, nbytes in zip(self._tiers, self._read, strict=True)}

    def hits(self, blocks: tuple[int, ...]) -> list[int]:
        """Leading blocks that each tier would deliver, beyond those of the tiers before it."""
        found, start = [], 0
        for kept in self.kept:
            count = kept.leading(blocks, start)
            found.append(count)
            start += count
        return found

    def serve(self, request: Arrival) -> Served:
        """Compute or load its prompt, then generate its reply."""
        hits = self.hits(request.blocks)
        if len(request.blocks) == sum(hits):  # the last token is always computed
            last = max(index for index, count in enumerate(hits) if count)
            hits[last] -= 1
        start = max(self.free_at, request.at)
        if self._policy.break_even:
            hits = self._worthwhile(request, hits, start)
        compute, took, self._tier_free = self._plan(request, hits, start)
        self.free_at = start + took + self._gpu.decode * request.reply
        for index, count in enumerate(hits):
            self._read[index] += count * BLOCK * self._model.kv_bytes
        self._keep(request.blocks, start + took)
        names = [tier.name for tier in self._tiers]
        found = {name: count * BLOCK for name, count in zip(names, hits, strict=True)}
        return Served(start + took - request.at, start - request.at, took - compute, len(request.blocks) * BLOCK, found)

    def _plan(self, request: Arrival, hits: list[int], start: float) -> tuple[float, float, list[float]]:
        """(seconds of compute, seconds until the first token, when each tier is done)."""
        prefix = sum(hits) * BLOCK
        compute = self._gpu.prefill(len(request.blocks) * BLOCK - prefix, prefix)
        took, done = compute, list(self._tier_free)
        for index, (tier, count) in enumerate(zip(self._tiers, hits, strict=True)):
            if count and tier.read != float("inf"):
                begin = max(done[index], request.at if self._policy.preload else start)
                done[index] = begin + tier.load(count * BLOCK * self._model.kv_bytes)
                took = max(took, tier.first_token(compute, max(0.0, done[index] - start), self._model.layers))
        return compute, took, done

    def _worthwhile(self, request: Arrival, hits: list[int], start: float) -> list[int]:
        """The part of the hits that pays: from the slowest tier upwards, what takes longer than it saves goes."""
        chosen = hits
        for index in reversed(range(len(self._tiers))):
            without = [count if number < index else 0 for number, count in enumerate(chosen)]
            if self._plan(request, chosen, start)[1] > self._plan(request, without, start)[1]:
                chosen = without
        return chosen

    def _keep(self, blocks: tuple[int, ...], now: float) -> None:
        for index, (tier, kept) in enumerate(zip(self._tiers, self.kept, strict=True)):
            nbytes = kept.touch(blocks) * BLOCK * self._model.kv_bytes
            self._written[index] += nbytes
            if nbytes and tier.write != float("inf") and not tier.windows:
                # Without windows the writes of this prompt share the drive with the reads of the next one.
                busy = max(self._tier_free[index], now)
                self._tier_free[index] = busy + nbytes / tier.write / tier.mixing * (1 - tier.mixing)
