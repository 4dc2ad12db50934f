"""What a node is made of: a GPU that computes prefills, tiers that keep and deliver KV, and what they cost.

Everything is arithmetic on seconds, bytes and tokens; no clock and no randomness.
"""

from typing import NamedTuple


class Model(NamedTuple):
    """A transformer: `layers`, `hidden` size, parameters of its linear layers, bytes of KV per token."""

    name: str
    layers: int
    hidden: int
    parameters: float
    kv_bytes: int


LLAMA_8B = Model("Llama-3-8B", 32, 4096, 8.0e9, 2 * 32 * 8 * 128 * 2)


class Gpu(NamedTuple):
    """`linear`: seconds per token; `attention`: seconds per pair of tokens that attend; `decode`: seconds of the GPU
    that one generated token takes, in a batch as it is usual."""

    linear: float
    attention: float
    decode: float = 0.0004

    def prefill(self, new: int, prefix: int) -> float:
        """Seconds to compute `new` tokens after `prefix` tokens whose KV is there."""
        return self.linear * new + self.attention * new * (prefix + new / 2)

    @classmethod
    def from_flops(cls, model: Model, flops: float, attention_share: float = 0.6) -> "Gpu":
        """From a sustained rate; attention reaches `attention_share` of what matrix products reach."""
        pair = 4 * model.layers * model.hidden
        return cls(2 * model.parameters / flops, pair / (flops * attention_share))


class Tier(NamedTuple):
    """Where KV is kept. `read`, `write`: bytes per second; `capacity`: bytes; `layerwise`: loads overlap the compute of
    the layers before; `setup`: seconds until the first byte moves; `price`: dollars per GB and hour; `mixing`: the
    share of bandwidth that is left while reads and writes are mixed; `windows`: writes keep out of the way of reads."""

    name: str
    read: float
    write: float
    capacity: float
    layerwise: bool = False
    setup: float = 0.0
    price: float = 0.0
    mixing: float = 1.0
    windows: bool = True

    def load(self, nbytes: float) -> float:
        """Seconds to read so much."""
        return self.setup + nbytes / self.read if nbytes else 0.0

    def first_token(self, compute: float, load: float, layers: int) -> float:
        """Seconds from the start of a prefill to its end when `load` seconds of reading belong to it: one after the
        other, or all but the first layer in the shadow of the other."""
        if not self.layerwise or not load:
            return compute + load
        longer, shorter = max(compute, load), min(compute, load)
        return longer + shorter / layers


class Prices(NamedTuple):
    """Dollars: per GPU and hour; per GB of DRAM and hour; per GB of SSD and hour (the paper's, Fig. 14)."""

    gpu: float = 5.0
    dram: float = 0.0088
    ssd: float = 0.000082
