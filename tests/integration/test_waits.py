"""What a request waits for is counted by phase, and drawn below its own span where SGLang traces."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from prometheus_client import CollectorRegistry
from sglang.srt.observability import trace

from tutti_sglang.integration import waits
from tutti_sglang.integration.waits import Waits
from tutti_sglang.metrics import Metrics

PHASES = ("queue", "lookup", "admission", "read")


class Tracer:
    """Keeps what SGLang's tracer would export: (name, context, start, end, attributes)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, int, int, dict[str, int]]] = []

    def start_span(self, name: str, context: Any, start_time: int, attributes: dict[str, int]) -> Any:
        return SimpleNamespace(
            end=lambda end_time: self.spans.append((name, context, start_time, end_time, attributes))
        )


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    monkeypatch.setattr(trace, "tracer", tracer := Tracer())
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    return tracer


def _request(waits_: Waits, rid: str) -> None:
    """As SGLang's threads do: announced, looked up, read in two batches."""

    def look(*_: Any) -> None:
        with waits_.looking_up(5):
            time.sleep(0.001)

    def read(*_: Any) -> None:
        for pages in (3, 2):
            with waits_.reading(pages):
                time.sleep(0.001)

    waits_.announce(rid)
    for work in (look, read):
        waits._work(work, None, SimpleNamespace(request_id=rid))


def test_every_phase_is_counted_once_for_a_request() -> None:
    metrics = Metrics(CollectorRegistry())
    _request(Waits(metrics), "a")
    (family,) = metrics._histograms["tutti_wait_seconds"].collect()
    counts = {s.labels["phase"]: s.value for s in family.samples if s.name.endswith("_count")}
    assert counts == {"queue": 1, "lookup": 1, "admission": 1, "read": 2}
    assert all(metrics.value("tutti_wait_seconds", phase=phase) > 0 for phase in PHASES)


def test_spans_lie_below_the_requests_own_and_follow_each_other(tracer: Tracer) -> None:
    ours = Waits(Metrics(CollectorRegistry()))
    ours.trace("a", "root of a")
    _request(ours, "a")
    _request(ours, "b")  # nobody traces it
    names, contexts, starts, ends, attributes = zip(*tracer.spans, strict=True)
    assert names == tuple(f"tutti {phase}" for phase in (*PHASES, "read"))
    assert set(contexts) == {"root of a"}
    assert all(start <= end for start, end in zip(starts, ends, strict=True))
    assert list(starts) == sorted(starts)
    assert [each.get("tutti.pages") for each in attributes] == [None, 5, None, 3, 2]


def test_opentelemetry_itself_takes_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import set_span_in_context

    provider, kept = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "tracer", provider.get_tracer("sglang server"), raising=False)
    root = trace.tracer.start_span("Req a")
    ours = Waits(Metrics(CollectorRegistry()))
    ours.trace("a", set_span_in_context(root))
    _request(ours, "a")
    spans = kept.get_finished_spans()
    assert [span.name for span in spans] == [f"tutti {phase}" for phase in (*PHASES, "read")]
    assert {span.parent.span_id for span in spans} == {root.get_span_context().span_id}


@pytest.mark.parametrize("enabled", [True, False])
def test_a_request_is_followed_where_sglang_traces_it(
    enabled: bool, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Waits(Metrics(CollectorRegistry()))
    monkeypatch.setattr(waits, "process_waits", lambda: ours)
    own = SimpleNamespace(tracing_enable=enabled, root_span_context="root")
    waits._follow(None, SimpleNamespace(rid="a", time_stats=SimpleNamespace(trace_ctx=own)))
    waits._follow(None, SimpleNamespace(rid="broken"))
    _request(ours, "a")
    assert bool(tracer.spans) is enabled


def test_a_tracer_that_fails_costs_no_page(tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tracer, "start_span", fails)
    ours = Waits(Metrics(CollectorRegistry()))
    ours.trace("a", "root")
    _request(ours, "a")


def test_requests_that_never_end_do_not_pile_up() -> None:
    ours = Waits(Metrics(CollectorRegistry()))
    for number in range(waits.MOST + 100):
        ours.announce(str(number))
    assert len(ours._requests) == waits.MOST


def test_a_lookup_knows_its_request_only_while_it_lasts_and_only_in_its_thread() -> None:
    seen: list[str | None] = []

    def look(_: Any, operation: Any) -> str:
        seen.append(waits.current_request())
        other = threading.Thread(target=lambda: seen.append(waits.current_request()))
        other.start()
        other.join()
        if operation.request_id == "b":
            raise ZeroDivisionError
        return "found"

    assert waits._work(look, None, SimpleNamespace(request_id="a")) == "found"
    with pytest.raises(ZeroDivisionError):
        waits._work(look, None, SimpleNamespace(request_id="b"))
    assert seen == ["a", None, "b", None]
    assert waits.current_request() is None
