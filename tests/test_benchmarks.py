"""Every benchmark runs at a tiny size and keeps all its rounds; the arithmetic behind the printed figures is right."""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks import (
    backends,
    break_even,
    client,
    contenders,
    long_context,
    mixed,
    publish,
    report,
    serving,
    soak,
    storage_summary,
    worker,
)
from benchmarks.gil import GilSampler
from benchmarks.plot import Point, bar_plot, line_plot
from benchmarks.pools import SHAPES, host_pool, shape_of
from benchmarks.report import Report
from benchmarks.server import Server

ROOT = Path(__file__).parent.parent
SIZE = 64 << 10


def _run(name: str, *arguments: str, json: Path) -> Report:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(json)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return msgspec.json.decode(json.read_bytes(), type=Report)


def test_every_contender_is_first_once() -> None:
    orders = [report.rotated("abc", turn) for turn in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_ratios_compare_only_within_a_round() -> None:
    rows = [
        {"round": 0, "a": 6},
        {"round": 1, "b": 5},
        {"round": 0, "b": 3},
        {"round": 2, "a": 8},
        {"round": 2, "b": 2},
    ]
    assert report.ratios(rows, lambda row: row.get("a"), lambda row: row.get("b")) == [2, 4]


def test_quartiles() -> None:
    assert report.quartiles([]) is None
    assert report.quartiles([3]) == (3, 3, 3)
    values = list(np.random.default_rng(1).random(9))
    assert np.allclose(report.quartiles(values), np.quantile(values, [0.25, 0.5, 0.75]))
    assert report.Quartiles(1, 2, 3).show("{:.0f}") == "2 (1 to 3)"


def test_a_figure_that_was_not_measured_is_not_invented() -> None:
    row = {"round": 0, "contender": "file", "size": SIZE, "operation": "put", "beside": "idle"}
    row |= {"bytes": 10**9, "seconds": 2.0, "seconds_accepted": 1.0, "cpu_user": 1.0, "cpu_system": 0.5}
    (line,) = storage_summary.summarise([row])
    assert (line["rate"].median, line["accepted"].median, line["cpu"].median) == (0.5, 1.0, 1.5)
    assert line["of_fio"] is line["tutti_over_it"] is line["busy_share"] is line["gil"] is None
    speed, cost = storage_summary.tables([line])
    assert speed.lines == [["file", "0.50 (0.50 to 0.50)", "1.00 (1.00 to 1.00)"]]
    assert cost.markdown().splitlines()[2:] == ["|  | CPU s/GB |", "| --- | ---: |", "| file | 1.50 (1.50 to 1.50) |"]


def test_a_summary_of_serving_compares_times_of_one_round_and_counts_hits() -> None:
    def row(turn: int, tier: str, ttft: float, storage: int) -> dict[str, Any]:
        times = {"ttft": ttft, "gaps": [0.01, 0.03]}
        return {"round": turn, "tier": tier, "phase": "restarted", "prompt": 100, "device": 0, "host": 0} | {
            **times,
            "storage": storage,
        }

    rows = [row(0, "with", 1, 50), row(0, "without", 4, 0), row(1, "with", 2, 50), row(1, "without", 4, 0)]
    with_tier, without = serving.summarise(rows)
    assert with_tier["speedup"].median == 3
    assert (with_tier["storage"], with_tier["prompt"], with_tier["itl_p50"]) == (100, 200, 0.02)
    assert without["speedup"] is None
    assert serving.figures("chat", [with_tier]).lines[0][-3] == "50.0%"


def test_the_machine_is_described(tmp_path: Path) -> None:
    run = Report("storage", report.machine(tmp_path), {"seed": 1})
    assert run.machine.cores > 0
    assert run.machine.file_system
    assert run.machine.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    run.write(tmp_path / "run.json")
    assert msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=Report) == run


def test_a_plot_is_xml_with_every_series_and_tick(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    series = {"a <b>": [Point(1024, 1, 0.5, 1.5), Point(4096, 3, 2, 4)], "c": [Point(4096, 1, 1, 1)]}
    line_plot(path, ("t", "x", "y"), series, {1024: "1KiB", 4096: "4KiB"})
    root = ElementTree.parse(path).getroot()
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a <b>", "c", "1KiB", "4KiB", "t", "x", "y"} <= texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 3


def test_the_sampler_tells_a_held_gil_from_a_released_one() -> None:
    def spin() -> None:
        start = time.monotonic()
        while time.monotonic() - start < 0.3:
            pass

    shares = []
    for work in (spin, lambda: time.sleep(0.3)):
        with GilSampler() as sampler:
            work()
        if sampler.result is None:
            pytest.skip(sampler.reason)
        shares.append(sampler.result.held / sampler.result.total)
    assert shares[0] > shares[1]


def test_pages_have_the_size_they_are_named_by() -> None:
    assert all(shape.page_bytes == size for size, shape in SHAPES.items())
    for layout in ("page_first_direct", "page_first", "layer_first"):
        pool = host_pool(shape_of(SIZE), 3, layout)
        assert pool.kv_buffer.nbytes == 3 * SIZE
    with pytest.raises(ValueError, match="64KiB"):
        shape_of(SIZE + 1)


def test_a_cold_file_is_not_in_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    backends.sync_file_system(tmp_path)
    assert backends.drop_page_cache(tmp_path) == 0


class _Liar(backends.File):
    """Says True and changes one byte."""

    def get(self, keys: list[str], indices: Any) -> bool:
        found = super().get(keys, indices)
        self.pool.kv_buffer.view(torch.uint8).view(-1)[7] ^= 1
        return found


def test_a_backend_that_returns_other_bytes_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(worker.BACKENDS, "liar", _Liar)
    for kind in ("file", "liar"):
        bench = worker.Bench(worker.Case(kind, {}, tmp_path / kind, shape_of(SIZE), 3, 2, "page_first_direct", 1))
        caught = pytest.raises(AssertionError, match="other bytes") if kind == "liar" else contextlib.nullcontext()
        with caught:
            bench.measure("get", "idle")
        bench.close()


def test_the_stream_of_a_server_is_read() -> None:
    assert client._event(b'data: {"output_ids": [1]}\n') == {"output_ids": [1]}
    assert client._event(b"\n") is None
    assert client._event(b"data: [DONE]\n") is None
    with pytest.raises(RuntimeError, match="too long"):
        client._event(b'data: {"error": {"message": "too long"}}\n')
    assert client.tokens("a", 5) == client.tokens("a", 5) != client.tokens("b", 5)


def test_storage_keeps_every_round_of_every_contender(tmp_path: Path) -> None:
    contenders = ["fio", "tutti", "tutti:checksum=off", "file"]
    chosen = [argument for name in contenders for argument in ("--contender", name)]
    sizes = ["--sizes", "64KiB", "--bytes", "1MiB", "--busy-bytes", "128KiB", "--rounds", "2", "--warm-up", "0"]
    operations = ["--operations", "put,get,hot,mixed", "--directory", str(tmp_path), "--svg", str(tmp_path / "svg")]
    run = _run("storage", *chosen, *sizes, *operations, json=tmp_path / "run.json")
    absent = [note for note in run.notes if "fio is not installed" not in note]
    assert not absent, absent
    for name in contenders[1:]:
        for operation in ("put", "get", "hot", "mixed"):
            found = [row for row in run.rows if (row["contender"], row["operation"]) == (name, operation)]
            assert sorted((row["beside"], row["round"]) for row in found) == [
                (beside, turn) for beside in ("busy", "gil", "idle") for turn in (0, 1)
            ]
            assert all(row["seconds"] > 0 for row in found)
    assert {line["contender"] for line in run.summary} >= set(contenders[1:])
    assert (tmp_path / "svg/storage-get.svg").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tutti-bench-")], "scratch stores were left"


def test_a_sweep_is_one_table_of_idle_rounds(tmp_path: Path) -> None:
    what = ["--sweep", "--contender", "tutti", "--contender", "tutti:queue_depth=1", "--sizes", "16KiB,64KiB"]
    size = ["--bytes", "256KiB", "--rounds", "1", "--warm-up", "0", "--directory", str(tmp_path)]
    run = _run("storage", *what, *size, json=tmp_path / "run.json")
    assert {row["beside"] for row in run.rows} == {"idle"}
    (table,) = publish.TABLES["storage"](run)
    assert [line[:2] for line in table.lines] == [
        [size, contender] for size in ("16KiB", "64KiB") for contender in ("tutti", "tutti:queue_depth=1")
    ]
    assert not any("-" in rate for line in table.lines for rate in line[2:])


def test_a_spinner_ends() -> None:
    before = threading.active_count()
    spinner = worker.Spinner()
    spinner.stop()
    assert threading.active_count() == before


@pytest.mark.parametrize("place", publish.PAGES, ids=lambda place: place.name)
def test_the_page_shows_what_was_measured(place: Path) -> None:
    page = place.read_text()
    assert publish.published(page, publish.RESULTS) == page, "run python -m benchmarks.publish"


def test_a_page_is_made_from_the_rounds(tmp_path: Path) -> None:
    run = Report("storage", report.machine(tmp_path), {"seed": 1})
    run.rows = [{"round": 0, "contender": "fio", "size": SIZE, "operation": "get", "beside": "idle"}]
    run.rows[0] |= {"bytes": 10**9, "seconds": 0.5, "cpu_user": 0.0, "cpu_system": 0.25}
    run.write(tmp_path / "storage.json")
    page = "a\n<!-- results of storage -->\nold\n<!-- end -->\nb\n<!-- results of chat -->\n<!-- end -->\n"
    made = publish.published(page, tmp_path)
    assert "| fio | 2.00 (2.00 to 2.00) |" in made
    assert "old" not in made
    assert made.endswith("b\n<!-- results of chat -->\nNot recorded yet.\n<!-- end -->\n")


def test_the_index_is_measured_idle_and_busy(tmp_path: Path) -> None:
    sizes = ["--objects", "3000", "--repeat", "2", "--directory", str(tmp_path)]
    run = _run("index", *sizes, json=tmp_path / "run.json")
    found = {(row["what"], row["beside"]) for row in run.rows}
    assert {("open", "idle"), ("lookup run", "busy"), ("publish", "busy"), ("size", "idle")} <= found
    assert all(row["round"] in (0, 1) for row in run.rows)
    assert not list(tmp_path.glob("tutti-bench-*")), "a scratch index was left"


def test_eviction_is_judged_on_every_trace(tmp_path: Path) -> None:
    run = _run("eviction", "--share", "0.02", "--capacities", "0.3", json=tmp_path / "run.json")
    rates = {(row["trace"], row["policy"]): row["hit_rate"] for row in run.rows}
    assert {trace for trace, _ in rates} == {
        name + scan for name in ("chat", "documents", "mooncake") for scan in ("", " + scan")
    }
    assert all(rate <= rates[trace, "optimum"] for (trace, _), rate in rates.items())


@pytest.mark.server
def test_chats_run_against_a_server_that_is_there(tmp_path: Path) -> None:
    server = Server(["--store", str(tmp_path / "store")], tmp_path / "log")
    try:
        asyncio.run(server.ready())
        sizes = ["--turns", "2", "--clients", "2", "--system", "128", "--turn-tokens", "64", "--output", "2"]
        run = _run("chat", *sizes, "--url", server.url, "--directory", str(tmp_path), json=tmp_path / "run.json")
    finally:
        server.stop()
    phases = [(line["phase"], line["requests"]) for line in run.summary]
    assert phases == [("first restore", 1), ("turn 1", 2), ("later turns", 2), ("flushed", 2)]
    assert run.summary[-1]["storage"] > 0
    assert run.notes == ["not restarted: give --restart COMMAND, or --serve"]


def test_windows_runs(tmp_path: Path) -> None:
    run = _run("windows", "--rounds", "1", "--seconds", "0.5", "--read", "4MiB", json=tmp_path / "run.json")
    assert [row["contender"] for row in run.rows] == ["windows on", "windows off", "no I/O"]
    assert all(row["reads"] and row["write_rate"] > 0 for row in run.rows[:2])
    assert all(line["step_p99"] > 0 for line in run.summary)


def test_steps_runs(tmp_path: Path) -> None:
    run = _run("steps", "--steps", "40", "--rounds", "2", json=tmp_path / "run.json")
    assert {row["step"] for row in run.rows} == {"decode", "prefill of 1", "prefill of 32", "idle"}
    assert all(row["microseconds"] > 0 for row in run.rows)


def test_first_get_runs(tmp_path: Path) -> None:
    sizes = ["--pages", "2", "--batches", "2", "--rounds", "1", "--directory", "/var/tmp"]
    run = _run("first_get", *sizes, json=tmp_path / "run.json")
    kinds = [(line["batch"], line["way"]) for line in run.summary]
    assert kinds == [(0, "ready"), (0, "not ready"), (1, "ready"), (1, "not ready")]
    assert all(row["lookup_ms"] > 0 and row["get_ms"] > 0 for row in run.rows)


def test_a_short_soak_loses_nothing_and_reads_nothing_wrong(tmp_path: Path) -> None:
    sizes = ["--minutes", "2.5", "--life", "10", "--capacity", "32MiB", "--segment", "4MiB", "--seed", "7"]
    run = _run("soak", *sizes, "--directory", "/var/tmp", "--svg", str(tmp_path), json=tmp_path / "run.json")
    (line,) = run.summary
    assert not run.notes
    assert (line["lost"], line["wrong"], line["wrong_after_restart"], line["call_errors"]) == (0, 0, 0, 0)
    assert min(line["restarts"], line["kills"], line["lives_with_faults"]) > 0
    assert line["came"] > 0
    assert line["faults_seen"] > 0
    assert line["written_over_capacity"] > 1
    assert {row["process"] for row in run.rows} == {"main", "side"}
    assert (tmp_path / "soak-memory.svg").exists()


def test_a_soak_complains_of_what_is_lost_and_of_memory_that_grows() -> None:
    rows = [{"minutes": m, "process": "main", "last": False, "rss": (100 + 2 * m) << 20} for m in range(30)]
    assert soak.growth(rows, 10) == pytest.approx(2)
    nothing = dict.fromkeys(("wrong", "wrong_after_restart", "lost", "call_errors"), 0)
    verified = dict.fromkeys(("unreadable", "lost", "double", "stray", "files"), 0)
    good = {**nothing, "verified": verified, "slope": 0.2}
    assert not soak.complaints(good)
    assert soak.complaints({**good, "lost": 3, "slope": 2.0, "verified": verified | {"double": 1}}) == [
        "3 pages were lost by a restart",
        "1 double",
        "memory grows by 2.00 MiB a minute",
    ]


def _sample(ttft: float, begun: float, storage: int = 0) -> client.Sample:
    return client.Sample(100, ttft, [0.1, 0.1], 0, 0, storage, [1, 2, 3], begun)


def test_rates_and_costs_are_those_of_the_wall_clock() -> None:
    rows = serving._rows(0, "with", "flushed", [_sample(0.8, 10.0), _sample(1.8, 10.0)])
    (line,) = serving.summarise(rows, dollars=3.6)
    assert line["tokens_per_second"] == pytest.approx(2 * 103 / 2)  # the slower one ends after 2 s
    assert line["dollars_per_million"] == pytest.approx(0.001 / (206 / 2) * 1e6)
    assert line["speedup"] is None


def test_a_contender_without_the_tier_has_no_account_of_it(tmp_path: Path) -> None:
    run = Report("chat", report.machine(tmp_path), {})
    assert serving.tier_figures("http://127.0.0.1:1") == {}
    serving._describe(run, "file", {})
    serving._describe(run, "with", {"read": 4e9, "written": 1e9, "drive": 2.0, "bubble": 0.5, "prefill": 10.0})
    assert run.contenders == {
        "with": "read 4.00 GB at 2.00 GB/s, wrote 1.00 GB, forward passes waited 0.50 s for layers (5.0% of prefills)"
    }


def test_every_contender_is_started_by_flags_and_variables(tmp_path: Path) -> None:
    for name in contenders.CONTENDERS:
        found = contenders.launch(name, tmp_path / name)
        assert ("--without-tier" in found.arguments) is (name not in ("with", "direct"))
        assert name in contenders.NAMES
        assert contenders.environment(found).items() >= dict(found.environ).items()
    assert str(tmp_path / "file") in contenders.launch("file", tmp_path / "file").environ.values()


def test_a_contender_that_cannot_take_part_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "refused", lambda name: "it is not installed")
    run = Report("compare", report.machine(tmp_path), {})
    assert serving._one(run, None, None, (0, "nixl"), tmp_path / "nixl") == []  # type: ignore[arg-type]
    assert run.notes == ["nixl does not take part: it is not installed"]


def test_a_mix_repeats_what_is_long_and_never_what_is_short() -> None:
    options = argparse.Namespace(requests=12, documents=2, tokens=64, rate=5.0, output=1)
    work = mixed.Mixed(options)
    cold, hot = (work.requests("seed", phase) for phase in ("cold", "hot"))

    def prompts(requests: list[mixed.Request], kind: str) -> list[tuple[int, ...]]:
        return [tuple(each.prompt) for each in requests if each.kind == kind]

    assert set(prompts(cold, "long")) == set(prompts(hot, "long"))
    assert not set(prompts(cold, "short")) & set(prompts(hot, "short"))
    assert [each.after for each in cold] == sorted(each.after for each in cold)


def test_a_data_set_is_read_as_far_as_it_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "loogle.jsonl"
    path.write_text('{"context": "one", "n": 1}\n\n{"n": 2}\n{"input": "two"}\n{"text": "three"}\n')
    assert long_context.documents(path, 2) == ["one", "two"]
    path.write_text('{"n": 2}\n')
    with pytest.raises(ValueError, match="context"):
        long_context.documents(path, 2)


def test_what_comes_again_is_as_long_and_shares_what_it_should() -> None:
    options = argparse.Namespace(tokens=100, prompts=1, reuse=0.25, data=None, output=1)
    work = long_context.LongContext(options)
    first, again = work._prompt("s", 0, ""), work._prompt("s", 0, "flushed/other")
    assert len(first) == len(again) == 100
    assert first[:25] == again[:25]
    assert first[25:] != again[25:]


def test_bars_are_drawn_for_what_was_measured(tmp_path: Path) -> None:
    series = {"a": {"cold": 10.0, "hot": 5.0}, "b": {"hot": 2.5}}
    bar_plot(tmp_path / "bars.svg", ("t", "", "ms"), series)
    root = ElementTree.parse(tmp_path / "bars.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    heights = [float(each.get("height", 0)) for each in root.iter(f"{space}rect") if float(each.get("height", 0)) > 4]
    assert sorted(heights[1:]) == [78.0, 156.0, 312.0]
    assert {"cold", "hot", "a", "b"} <= {each.text for each in root.iter(f"{space}text")}


def test_break_even_is_judged_within_a_round() -> None:
    def row(turn: int, what: str, ttft: float, storage: int) -> dict[str, Any]:
        case = {"round": turn, "break_even": "on", "disk": "slow", "tokens": 100}
        return {**case, "what": what, "ttft": ttft, "storage": storage}

    rows = [row(0, "stored", 1.0, 0), row(0, "new", 1.0, 0), row(1, "stored", 3.0, 50), row(1, "new", 2.0, 0)]
    (line,) = break_even.summarise(rows)
    assert line["stored_over_new"].median == 1.25
    assert line["loaded"] == 0.25
    assert break_even.figures([line]).lines[0][-1] == "25%"


@pytest.mark.server
def test_caches_are_compared_in_one_report(tmp_path: Path) -> None:
    sizes = ["--tiers", "nixl,with", "--scale", "0.2", "--directory", str(tmp_path), "--svg", str(tmp_path / "c.svg")]
    run = _run("compare", *sizes, json=tmp_path / "run.json")
    hits = {line["phase"]: line["storage"] for line in run.summary if line["tier"] == "with"}
    assert hits["long: cold"] == hits["long: hot"] == 0
    for name in ("long", "prefix", "chat"):
        assert hits[f"{name}: flushed"] >= 256
        assert hits[f"{name}: restarted"] >= 256
    assert all("nixl" in note for note in run.notes)
    assert "GB/s" in run.contenders["with"]
    assert (tmp_path / "c.svg").exists()


def test_preload_runs_and_draws_its_loads(tmp_path: Path) -> None:
    sizes = ["--requests", "2", "--pages", "2", "--layers", "3", "--layer-ms", "1", "--busy-ms", "1", "--rounds", "1"]
    drawn = tmp_path / "loads.svg"
    more = ["--directory", str(tmp_path), "--picture", str(drawn)]
    run = _run("preload", *sizes, *more, json=tmp_path / "run.json")
    assert [(row["mode"], row["number"]) for row in run.rows] == [
        (mode, number) for mode in ("preload", "no preload") for number in (0, 1)
    ]
    assert all(row["ttft"] > 0.003 for row in run.rows)
    assert drawn.read_text().count("<rect") == 1 + 4 * 3
    assert not list(tmp_path.glob("tutti-bench-*")), "a scratch store was left"


@pytest.mark.server
@pytest.mark.matrix
def test_a_queue_at_real_servers_is_loaded_with_and_without_reading_ahead(tmp_path: Path) -> None:
    sizes = ["--requests", "2", "--tokens", "512", "--busy", "512", "--rounds", "1", "--directory", str(tmp_path)]
    run = _run("preload_servers", *sizes, json=tmp_path / "run.json")
    assert {(row["disk"], row["mode"], row["number"]) for row in run.rows} == {
        (disk, mode, number) for disk in ("fast", "slow") for mode in ("preload", "no preload") for number in (0, 1)
    }
    assert all(row["storage"] >= 384 and row["ttft"] > 0 for row in run.rows)
