"""A server's /metrics as numbers, and what changed between two looks at it."""

import http.client
import time
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tutti_sglang.errors import TuttiError

Labels = frozenset[tuple[str, str]]


class Look(NamedTuple):
    """Samples of one moment: name → labels → value; counters keep their name without `_total`."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    def total(self, name: str, **labels: str) -> float:
        """The sum over the labels that are not given; 0 where there is no such metric."""
        wanted = set(labels.items())
        return sum(value for found, value in self.samples.get(name, {}).items() if wanted <= found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of one label."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            key = dict(labels).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found


class Change(NamedTuple):
    """From one look to the next."""

    before: Look
    now: Look

    def rate(self, name: str, **labels: str) -> float:
        """Per second; a counter that fell belongs to a server that was started again, and counts from zero."""
        return self._rate(self.before.total(name, **labels), self.now.total(name, **labels))

    def rates(self, name: str, label: str) -> dict[str, float]:
        """Per second, for each value of one label."""
        before, now = self.before.by(name, label), self.now.by(name, label)
        return {key: self._rate(before.get(key, 0.0), value) for key, value in now.items()}

    def _rate(self, before: float, now: float) -> float:
        return (now - before if now >= before else now) / max(1e-9, self.now.at - self.before.at)


def look(url: str) -> Look:
    """Ask a server. TuttiError where it does not answer, or does not know the tier."""
    address = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            found = parse(answer.read().decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TuttiError(
            f"{address} does not answer ({error})", "Start the server with --enable-metrics, or name it: --url URL"
        ) from error
    if not any(name.startswith("tutti_") for name in found.samples):
        raise TuttiError(f"{address} has no tutti_* metrics", "Is the tier attached, and --enable-metrics given?")
    return found


def parse(text: str) -> Look:
    """Prometheus' text format. ValueError."""
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    where = samples.setdefault(sample.name.removesuffix("_total"), {})
                    labels = frozenset(sample.labels.items())
                    where[labels] = where.get(labels, 0.0) + sample.value
    except (ArithmeticError, LookupError, TypeError) as error:  # what the library does with a garbled line
        raise ValueError(f"not Prometheus' text format: {error}") from error
    return Look(time.monotonic(), samples)
