"""The Grafana board and the alert rules in a real Prometheus, which scrapes a real store's metrics."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from tests.store.kit import config, get, namespace, put
from tutti_sglang.integration.launch import free_port
from tutti_sglang.metrics import Metrics
from tutti_sglang.store import ObjectStore

MONITORING = Path(__file__).parent.parent / "docs" / "monitoring"


class Prometheus:
    """A server that loads the alert rules and scrapes one target each second."""

    def __init__(self, folder: Path, target: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        shutil.copy(MONITORING / "alerts.yml", folder / "alerts.yml")
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            "rule_files: [alerts.yml]\n"
            f"scrape_configs: [{{job_name: sglang, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
        )
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "log").open("wb") as log:
            address = f"--web.listen-address={self.url.removeprefix('http://')}"
            self._process = subprocess.Popen([*command, address], stdout=log, stderr=log)

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def eventually(self, true: Callable[[], bool]) -> None:
        """Until something is so: it starts, scrapes and evaluates in its own time."""
        until = time.monotonic() + 120
        while True:
            try:
                if true():
                    return
            except OSError:
                pass
            assert time.monotonic() < until
            time.sleep(0.2)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Metrics, WSGIServer]]:
    """Of a store that was used, exported."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    store = ObjectStore(config(tmp_path_factory.mktemp("store")), metrics=metrics)
    ns = store.attach(namespace())
    put(store, ns, *range(20))
    store.drain(20)
    assert all(get(store, ns, *range(20)))
    server, _ = start_http_server(0, "127.0.0.1", registry)
    yield metrics, server
    server.shutdown()
    store.close()


@pytest.fixture(scope="module")
def prometheus(metrics: tuple[Metrics, WSGIServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed (apt-get install prometheus)")
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), metrics[1].server_port)
    server.eventually(
        lambda: len(server.ask("query", query="count_over_time(tutti_bytes_total[1m]) > 2")["result"]) > 0
    )
    yield server
    server.stop()


def test_every_panel_of_the_board_is_a_query_that_prometheus_answers(prometheus: Prometheus) -> None:
    board = json.loads((MONITORING / "grafana.json").read_bytes())
    asked = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in board["panels"]}
    drawn = set()
    for title, expressions in asked.items():
        for expression in expressions:
            query = expression.replace("$instance", ".*").replace("$__rate_interval", "1m")
            if prometheus.ask("query", query=query)["result"]:
                drawn.add(title)
    assert drawn >= {"Hits by tier", "Bytes moved", "Puts by outcome", "Space", "Drives in service"}
    assert "Waits of requests, 99th percentile by phase" in drawn


def test_the_alert_rules_are_evaluated_without_an_error(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    prometheus.eventually(lambda: all(rule["health"] == "ok" for rule in rules()))
    assert len(rules()) >= 5
    assert not [rule["name"] for rule in rules() if rule.get("lastError")]
    assert {rule["name"] for rule in rules() if rule["state"] != "inactive"} == set()


def test_a_drive_that_leaves_service_raises_the_alarm(
    prometheus: Prometheus, metrics: tuple[Metrics, WSGIServer]
) -> None:
    metrics[0].set("tutti_drive_in_service", 0, drive="0")
    metrics[0].add("tutti_missed_objects", 1, reason="checksum")

    def raised() -> set[str]:
        return {alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]}

    prometheus.eventually(lambda: "TuttiDriveOutOfService" in raised())


def test_grafana_has_what_the_board_names() -> None:
    board = json.loads((MONITORING / "grafana.json").read_bytes())
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
    known = {variable["name"] for variable in board["templating"]["list"]}
    assert known == {"source", "instance"}
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${source}"
        assert panel["targets"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
