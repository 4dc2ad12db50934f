"""Which models, layouts, shapes of ranks and flags of SGLang were served by real servers, and docs/integration.md.

`make matrix` runs every case and records what came out in docs/results/matrix.json, with the date; the page is made
of the cases and the record.
"""

import datetime
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.server import Launch, hicache
from tests.integration.stores import extra
from tutti_sglang.integration.cpu_model import Shape, built_in_model

ROOT = Path(__file__).parent.parent.parent
PAGE, RECORD = ROOT / "docs/integration.md", ROOT / "docs/results/matrix.json"
TEST = "tests/integration/test_models.py"
START, END = "<!-- made by make matrix -->\n", "<!-- end -->"

SHAPES = {
    "Llama (GQA)": Shape(),
    "MiniCPM3 (MLA)": Shape(latent=128),
    "Mellum (sliding window)": Shape(window=128),
    "Falcon-H1 (Mamba2 + attention)": Shape(state=16),
}


class Case(NamedTuple):
    """One server."""

    name: str
    model: str
    layout: str = "page_first_direct"
    page_size: int = 64
    tp: int = 1
    flags: tuple[str, ...] = ()
    write: str = "write_through"
    prefetch: str = "timeout"

    def launch(self, store: Path) -> Launch:
        """The server, its store in the folder `store`."""
        io_backend = "direct" if self.layout in ("page_first_direct", "layer_first") else "kernel"
        flags = ("--page-size", str(self.page_size), "--max-total-tokens", str(TOKENS))
        flags += ("--hicache-mem-layout", self.layout, "--hicache-io-backend", io_backend)
        flags += ("--hicache-write-policy", self.write, "--hicache-storage-prefetch-policy", self.prefetch)
        flags += (*self.flags, *(("--max-mamba-cache-size", "64") if SHAPES[self.model].state else ()))
        return Launch(
            flags=hicache("tutti", *flags, extra=extra(store, prefetch_timeout_base=100)),
            model=built_in_model(shape=SHAPES[self.model]),
            environ=ENVIRON,
            ranks=self.tp,
        )


TOKENS = 4096  # room on the device: what a test asks for beyond it pushes the earlier out
ENVIRON = (("SGLANG_MAMBA_CONV_DTYPE", "float32"),)  # rounding a state would change what follows a restore

MLA, WINDOW, HYBRID, LLAMA = (
    "MiniCPM3 (MLA)",
    "Mellum (sliding window)",
    "Falcon-H1 (Mamba2 + attention)",
    "Llama (GQA)",
)
NO_OVERLAP, CHUNKED = ("--disable-overlap-schedule",), ("--chunked-prefill-size", "256")
PP, DP = ("--pp-size", "2"), ("--dp-size", "2")
BUFFER_ONLY = ("--hicache-host-memory-mode", "buffer_only")

CASES = (
    Case("mla", MLA, "page_first", 16, flags=CHUNKED, prefetch="wait_complete"),
    Case("window", WINDOW, flags=CHUNKED),
    Case("hybrid", HYBRID, prefetch="wait_complete"),
    Case("pipeline", LLAMA, "layer_first", 32, 1, (*PP, *CHUNKED), "write_through_selective"),
    Case("mla-tensor", MLA, "layer_first", 64, 2, NO_OVERLAP, "write_back", "wait_complete"),
    Case("mla-buffer", MLA, "page_first_direct", 64, 1, BUFFER_ONLY, prefetch="wait_complete"),
    Case("window-tensor", WINDOW, "page_first", 64, 2, CHUNKED, prefetch="wait_complete"),
    Case("window-selective", WINDOW, "page_first_direct", 16, 1, NO_OVERLAP, "write_through_selective"),
    Case("window-back", WINDOW, "layer_first", 64, 1, (), "write_back", "wait_complete"),
    Case("window-buffer", WINDOW, "page_first_direct", 64, 1, BUFFER_ONLY, prefetch="wait_complete"),
    Case("hybrid-one-token", HYBRID, "page_first_direct", 1, 1, NO_OVERLAP, prefetch="wait_complete"),
    Case("hybrid-tensor", HYBRID, "page_first_direct", 64, 2, (), prefetch="wait_complete"),
    Case("data", LLAMA, "page_head", 64, 1, DP, prefetch="wait_complete"),
    Case("data-attention", MLA, "page_first_direct", 64, 2, (*DP, "--enable-dp-attention"), prefetch="timeout"),
    Case("pipeline-back", LLAMA, "page_first", 64, 1, (*PP, *NO_OVERLAP), "write_back", "wait_complete"),
    Case("back", LLAMA, "page_first", 64, 1, (*NO_OVERLAP, *CHUNKED), "write_back", "timeout"),
    Case("best-effort", LLAMA, "page_head", 16, 1, (), "write_through_selective", "best_effort"),
    Case("ngram", LLAMA, flags=("--speculative-algorithm", "NGRAM", *NO_OVERLAP), prefetch="wait_complete"),
)


class Outcome(NamedTuple):
    """What a run of `make matrix` saw. `case`: the case as it was then, so that a changed one counts as untested."""

    date: str
    works: bool
    case: list[Any]
    why: str = ""


def recorded() -> dict[str, Outcome]:
    """By the case's name."""
    return {name: Outcome(*fields) for name, fields in json.loads(RECORD.read_text()).items()}


def result(case: Case, record: dict[str, Outcome]) -> str:
    """The last cell of a row."""
    seen = record.get(case.name)
    if seen is None or seen.case != _plain(case):
        return "untested"
    return f"works ({seen.date})" if seen.works else f"does not work ({seen.date}): {seen.why}"


def _plain(case: Case) -> list[Any]:
    return list(json.loads(json.dumps(case)))


def tables(record: dict[str, Outcome]) -> str:
    """The part of the page that nobody types."""
    rows = [
        (
            case.name,
            case.model,
            case.layout,
            str(case.page_size),
            str(case.tp),
            " ".join(f"`{word}`" for word in _words(case.flags)) or "-",
            case.write,
            case.prefetch,
            result(case, record),
        )
        for case in CASES
    ]
    head = (
        "server",
        "model",
        "host layout",
        "page",
        "TP",
        "further flags",
        "write policy",
        "prefetch policy",
        "result",
    )
    return _table(head, rows)


def _words(flags: Iterable[str]) -> list[str]:
    """Each flag with its value."""
    words: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            words.append(flag)
        else:
            words[-1] += f" {flag}"
    return words


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def page(text: str) -> str:
    """The page with its made part made anew."""
    before, rest = text.split(START)
    return before + START + "\n" + tables(recorded()) + "\n" + END + rest.split(END)[1]


def run(names: list[str]) -> dict[str, Outcome]:
    """Run the cases (all, or those named), each in the test that the page stands on."""
    chosen = [case for case in CASES if not names or case.name in names]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [f"{TEST}::test_what_was_computed_comes_back[{case.name}]" for case in chosen]
        command = [sys.executable, "-m", "pytest", *tests, "-m", "matrix", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, check=False)
        seen = {case.get("name", ""): case for case in ElementTree.parse(report).iter("testcase")}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    outcomes = {}
    for case in chosen:
        test = seen[f"test_what_was_computed_comes_back[{case.name}]"]
        failure = next((child for child in test if child.tag in ("failure", "error")), None)
        why = "" if failure is None else failure.get("message", "").splitlines()[0][:200]
        outcomes[case.name] = Outcome(today, failure is None, _plain(case), why)
    return outcomes


def main() -> None:
    """Run, record, publish."""
    outcomes = {name: list(outcome) for name, outcome in {**recorded(), **run(sys.argv[1:])}.items()}
    RECORD.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
