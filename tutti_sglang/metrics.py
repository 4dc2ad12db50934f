"""Every `tutti_*` metric, in one place: names, labels and meaning."""

from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tutti_lookup_objects": ("Objects that were looked up", ("outcome",)),
    "tutti_hit_objects": ("Objects that were delivered", ("tier",)),
    "tutti_missed_objects": ("Objects that were asked for and not delivered", ("reason",)),
    "tutti_ahead_batches": ("Batches read ahead of the call that asks for them", ("outcome",)),
    "tutti_put_objects": ("Objects offered to the store", ("outcome",)),
    "tutti_pool_pages": ("Pages of a pool that SGLang asked for", ("pool", "op", "outcome")),
    "tutti_withheld_pages": ("Stored pages that a side pool did not let be restored", ("pool",)),
    "tutti_evicted_objects": ("Objects removed to make room", ()),
    "tutti_peer_objects": ("Objects that the fleet was asked for or offered", ("op", "outcome")),
    "tutti_preload_objects": ("Objects read ahead for requests that wait", ("outcome",)),
    "tutti_load_pages": ("Pages that loads of the direct path moved into device slots", ("source",)),
    "tutti_load_requests": ("Requests with a load of the direct path", ("outcome",)),
    "tutti_load_wait_seconds": ("Time that forward passes waited for layers", ()),
    "tutti_planned_bytes": ("I/O that plans of prefills issued with their layers", ("io",)),
    "tutti_load_overdue_seconds": ("Time that loads waited for drives that had not answered by their deadline", ()),
    "tutti_bytes": ("Payload bytes moved", ("op",)),
    "tutti_break_even_requests": ("Requests with stored pages, by what was decided", ("outcome",)),
    "tutti_declined_objects": (
        "Stored objects that were not reported, since loading them would take longer",
        (),
    ),
    "tutti_write_turns": ("Loads of writes that were started", ("reason",)),
    "tutti_write_wait_seconds": ("Time that loads of writes waited for a window", ("reason",)),
    "tutti_read_wait_seconds": ("Time that reads waited for writes in flight", ()),
    "tutti_overlap_seconds": ("Time in which reads and writes were in flight on one drive", ("drive",)),
    "tutti_step_seconds": ("What SGLang's scheduler did with its time", ("mode",)),
    "tutti_io_errors": ("I/O that a drive refused or did not answer in time", ("drive", "op", "kind")),
    "tutti_call_errors": ("Exceptions that were kept from SGLang", ("call",)),
    "tutti_index_errors": ("Index statements that failed", ("op",)),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tutti_break_even_tokens": ("Shortest whole prompt that is loaded sooner than computed; 0: none", ()),
    "tutti_capacity_bytes": ("Bytes the store may use on a drive", ("drive",)),
    "tutti_segment_bytes": ("Bytes of preallocated segments on a drive", ("drive",)),
    "tutti_staging_bytes": ("Staging memory in use, its high-water mark and its size", ("kind",)),
    "tutti_preload_bytes": ("Memory for pages that were read ahead: in use, and its size", ("kind",)),
    "tutti_quarantined_bytes": ("Staging memory whose I/O has not come back", ()),
    "tutti_peer_in_service": ("1 while the fleet is asked, 0 while it is not", ()),
    "tutti_drive_in_service": ("1 when the drive serves, 0 when it was put out of service", ("drive",)),
}
_HISTOGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tutti_wait_seconds": ("What requests wait for, by phase", ("phase",)),
}
_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """Counters, gauges and histograms of this process, by default in the registry that SGLang's /metrics exports."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = REGISTRY if registry is None else registry
        self._counters = {n: Counter(n, text, labels, registry=registry) for n, (text, labels) in _COUNTERS.items()}
        self._gauges = {
            n: Gauge(n, text, labels, multiprocess_mode="livesum", registry=registry)
            for n, (text, labels) in _GAUGES.items()
        }
        self._histograms = {
            n: Histogram(n, text, labels, buckets=_BUCKETS, registry=registry)
            for n, (text, labels) in _HISTOGRAMS.items()
        }

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count. `amount` ≥ 0; nothing is recorded for 0."""
        if amount > 0:
            counter = self._counters[name]
            (counter.labels(**labels) if labels else counter).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add to a histogram."""
        self._histograms[name].labels(**labels).observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        """The present value of a counter or gauge of this process, summed over the labels not given; of a histogram,
        the sum of what was observed."""
        metric = self._counters.get(name) or self._gauges.get(name) or self._histograms[name]
        left_out = ("_created", "_bucket", "_count")
        samples = [s for family in metric.collect() for s in family.samples if not s.name.endswith(left_out)]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


@cache
def process_metrics() -> Metrics:
    """The one instance that SGLang's /metrics shows; made late, after SGLang chose prometheus' multiprocess
    directory."""
    return Metrics()
