"""The Tutti paper's figures, predicted: calibrated on its raw bandwidths and its Fig. 2 alone.

Fig. 2 gives shares of GPU time lost (Llama-3-8B, 64K tokens, 75 % hit, vLLM 0.17.0): DRAM 14.2 %, SSD 72.8 %, GDS
72.3 %, and says that computing all anew takes 33.9 % less than reuse from SSD. With DRAM at its raw 50 GB/s that fixes
the compute time, its split between linear layers and attention, and the bandwidths that LMCache gets out of SSD and
GDS. Nothing is touched afterwards: what the predictions miss is what those numbers do not contain.
"""

from typing import NamedTuple

from benchmarks.simulation.models import LLAMA_8B, Gpu, Prices, Tier
from benchmarks.simulation.node import Node
from benchmarks.simulation.replay import alone, highest_rate, replay
from benchmarks.simulation.traffic import documents

GB = 1e9
DRAM_RAW, SSD_READ, SSD_WRITE = 50 * GB, 29 * GB, 12 * GB
BUBBLE = {"DRAM": 0.142, "SSD": 0.728, "GDS": 0.723}
RECOMPUTE = 1 - 0.339
SEQUENCE, HIT = 64 << 10, 0.75
HBM_BYTES, DRAM_BYTES, SSD_BYTES = 40 * GB, 256 * GB, 14e12


class Prediction(NamedTuple):
    """One number of the paper and ours."""

    what: str
    predicted: float
    paper: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.paper - 1


class Calibration(NamedTuple):
    """What Fig. 2 and the raw bandwidths say."""

    gpu: Gpu
    tiers: dict[str, Tier]


def calibrate() -> Calibration:
    """Solve for the compute model and the baselines' bandwidths."""
    prefix, new = int(SEQUENCE * HIT), int(SEQUENCE * (1 - HIT))
    nbytes = prefix * LLAMA_8B.kv_bytes
    compute = nbytes / DRAM_RAW * (1 - BUBBLE["DRAM"]) / BUBBLE["DRAM"]
    ssd = compute / (1 - BUBBLE["SSD"])
    # compute = l * new + a * new * (prefix + new / 2); recompute of all = l * all + a * all² / 2
    whole = RECOMPUTE * ssd
    pairs, all_pairs = new * (prefix + new / 2), SEQUENCE * SEQUENCE / 2
    attention = (whole - compute * SEQUENCE / new) / (all_pairs - pairs * SEQUENCE / new)
    linear = (compute - attention * pairs) / new
    read = {name: nbytes / (compute * share / (1 - share)) for name, share in BUBBLE.items()}
    tiers = {
        "HBM": Tier("HBM", float("inf"), float("inf"), HBM_BYTES),
        "DRAM": Tier("DRAM", DRAM_RAW, DRAM_RAW, DRAM_BYTES, layerwise=True, price=Prices().dram),
        "SSD": Tier("SSD", read["SSD"], SSD_WRITE, SSD_BYTES, price=Prices().ssd),
        "GDS": Tier("GDS", read["GDS"], SSD_WRITE, SSD_BYTES, price=Prices().ssd),
        "Tutti": Tier("Tutti", SSD_READ, SSD_WRITE, SSD_BYTES, layerwise=True, price=Prices().ssd),
    }
    return Calibration(Gpu(linear, attention), tiers)


def predictions() -> list[Prediction]:
    """Figs. 11 and 13, Table 1, and the request rates under a limit of 1 s."""
    found = calibrate()
    return [*_figure_11(found), *_figure_13(found), *_rates(found)]


def first_token(found: Calibration, tier: str, total: int, prefix: int) -> float:
    """Seconds for one prompt of `total` tokens whose first `prefix` come from a tier."""
    way = found.tiers[tier]
    load = way.load(prefix * LLAMA_8B.kv_bytes) if way.read != float("inf") else 0.0
    return way.first_token(found.gpu.prefill(total - prefix, prefix), load, LLAMA_8B.layers)


def _figure_11(found: Calibration) -> list[Prediction]:
    total, prefix = 128 << 10, 112 << 10
    ours, ssd = first_token(found, "Tutti", total, prefix), first_token(found, "SSD", total, prefix)
    gds = first_token(found, "GDS", total, 32 << 10), first_token(found, "Tutti", total, 32 << 10)
    return [
        Prediction("Fig. 11: SSD, 112K of 128K, s", ssd, 7.84),
        Prediction("Fig. 11: Tutti, 112K of 128K, s", ours, 3.43),
        Prediction("Fig. 11: SSD / Tutti", ssd / ours, 2.28),
        Prediction("Fig. 11: saved against GDS at 32K", 1 - gds[1] / gds[0], 0.058),
    ]


def _figure_13(found: Calibration) -> list[Prediction]:
    return [
        Prediction("Fig. 13: compute = I/O at a hit of, Tutti", crossover(found, "Tutti", 32 << 10), 0.983),
        Prediction("Fig. 13: compute = I/O at a hit of, DRAM", crossover(found, "DRAM", 32 << 10), 0.979),
    ]


def crossover(found: Calibration, tier: str, total: int) -> float:
    """The share of a prompt from which on loading takes longer than computing the rest."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        prefix = int(total * middle)
        hidden = found.tiers[tier].load(prefix * LLAMA_8B.kv_bytes) <= found.gpu.prefill(total - prefix, prefix)
        low, high = (middle, high) if hidden else (low, middle)
    return low


def _rates(found: Calibration) -> list[Prediction]:
    """LEval-like questions, Poisson, mean TTFT within 1 s."""

    def mean_ttft(name: str, rate: float) -> float:
        tiers = (found.tiers["HBM"], found.tiers[name])
        arrivals = documents(rate, 3000 / rate)
        return replay(arrivals, [Node(LLAMA_8B, found.gpu, tiers)], tiers, alone, Prices()).ttft_mean

    best = {
        name: highest_rate(lambda rate, name=name: mean_ttft(name, rate), 1.0, 0.01, 20.0)  # type: ignore[misc]
        for name in ("DRAM", "GDS", "Tutti")
    }
    return [
        *_hit_rates(found),
        Prediction("rate within 1 s: Tutti / DRAM", best["Tutti"] / best["DRAM"], 1.5),
        Prediction("rate within 1 s: Tutti / GDS", best["Tutti"] / best["GDS"], 2.0),
    ]


def _hit_rates(found: Calibration) -> list[Prediction]:
    """Table 1: how much of LEval's prompts each size of cache has."""
    result = []
    for names, paper in ((("HBM",), 0.08), (("HBM", "DRAM"), 0.53), (("HBM", "Tutti"), 0.84)):
        tiers = tuple(found.tiers[name] for name in names)
        outcome = replay(documents(1.0, 3000), [Node(LLAMA_8B, found.gpu, tiers)], tiers, alone, Prices())
        result.append(Prediction(f"Table 1: hit rate with {' and '.join(names)}", sum(outcome.hits.values()), paper))
    return result
