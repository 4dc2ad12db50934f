"""top: what a server's metrics say, and what changed; over HTTP, from the metrics of a real store."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.cli.kit import parsed, tutti
from tests.store.kit import config, get, namespace, store_pages
from tutti_sglang.cli.scrape import Change, Look, parse
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import ObjectStore


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def url(registry: CollectorRegistry) -> Iterator[str]:
    """Serves the registry as SGLang does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(generate_latest(registry))

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_top_shows_drives_and_rates_of_a_store_at_work(disk: Path, registry: CollectorRegistry, url: str) -> None:
    store = ObjectStore(config(disk), metrics=Metrics(registry))
    number = store.attach(namespace())
    store_pages(store, number, 1, 2, 3)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            get(store, number, 1, 2, 3, 4)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        data = parsed("top", "--url", url, "--interval", "0.3")["data"]
        text = tutti("top", "--url", url, "--interval", "0.3", "--once").stdout
    finally:
        stop.set()
        reader.join()
        store.close()
    assert data["drives"]["0"]["in_service"]
    assert data["drives"]["0"]["segment_bytes"] > 0
    assert data["hits_per_second"]["drive"] > 0
    assert data["misses_per_second"]["absent"] > 0
    assert data["bytes_per_second"]["read"] > 0
    assert "in service" in text
    assert "misses: absent" in text


def test_a_drive_out_of_service_is_exit_code_one(disk: Path, registry: CollectorRegistry, url: str) -> None:
    metrics = Metrics(registry)
    store = ObjectStore(config(disk), metrics=metrics)
    metrics.set("tutti_drive_in_service", 0, drive="0")
    assert tutti("top", "--url", url, "--interval", "0.1", "--once").exit_code == 1
    assert store.close()


def test_a_server_without_the_tier_and_no_server_are_errors_with_a_hint(url: str) -> None:
    assert "Is the tier attached" in parsed("top", "--url", url)["error"]["hint"]
    assert "--enable-metrics" in parsed("top", "--url", "http://127.0.0.1:9")["error"]["hint"]


def test_a_counter_that_fell_counts_from_zero() -> None:
    labels = frozenset({("op", "read")})
    change = Change(Look(10.0, {"n": {labels: 500.0}}), Look(12.0, {"n": {labels: 30.0}}))
    assert change.rate("n") == 15.0
    assert change.rates("n", "op") == {"read": 15.0}
    assert change.rate("absent") == 0.0


def test_samples_of_several_processes_add_up() -> None:
    found = parse('# TYPE a gauge\na{pid="1",drive="0"} 2\na{pid="2",drive="0"} 3\n')
    assert found.total("a") == 5
    assert found.by("a", "drive") == {"0": 5}
