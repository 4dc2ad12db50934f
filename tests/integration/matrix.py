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

from tests.integration.server import ADMIN, Launch, hicache
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

    @property
    def keeps_ends(self) -> bool:
        """Whether SGLang keeps a state only where a prompt or a reply ended (`no_buffer`, which it takes for pages of
        one token without overlap: arg_groups/overrides.py:477)."""
        return bool(SHAPES[self.model].state) and self.page_size == 1 and self.flags == NO_OVERLAP

    def launch(self, store: Path | None = None) -> Launch:
        """The server, its store in the folder `store`; without one a server to which an administrator attaches it."""
        io_backend = "direct" if self.layout in ("page_first_direct", "layer_first") else "kernel"
        flags = ("--page-size", str(self.page_size), "--max-total-tokens", str(TOKENS))
        flags += ("--hicache-mem-layout", self.layout, "--hicache-io-backend", io_backend)
        flags += ("--hicache-write-policy", self.write, "--hicache-storage-prefetch-policy", self.prefetch)
        flags += (*self.flags, *(("--max-mamba-cache-size", "64") if SHAPES[self.model].state else ()))
        storage = ("--enable-hierarchical-cache", *ADMIN)
        if store:
            # Nobody measures here: all that is there is loaded, whatever a busy machine makes of it.
            storage = hicache("tutti", extra=extra(store, prefetch_timeout_base=100, break_even="off"))
        return Launch(
            flags=(*storage, *flags),
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
    Case("hybrid-one-token-overlap", HYBRID, "page_first_direct", 1, 1, (), prefetch="wait_complete"),
    Case("hybrid-tensor", HYBRID, "page_first_direct", 64, 2, (), prefetch="wait_complete"),
    Case("data", LLAMA, "page_head", 64, 1, DP, prefetch="wait_complete"),
    Case("data-attention", WINDOW, "page_first_direct", 64, 2, (*DP, "--enable-dp-attention"), prefetch="timeout"),
    Case("pipeline-back", LLAMA, "page_first", 64, 1, (*PP, *NO_OVERLAP), "write_back", "wait_complete"),
    Case("back", LLAMA, "page_first", 64, 1, (*NO_OVERLAP, *CHUNKED), "write_back", "timeout"),
    Case("best-effort", LLAMA, "page_head", 16, 1, (), "write_through_selective", "best_effort"),
)


HERE = "tests/integration"
REFUSED = f"{HERE}/test_codecs.py::test_what_is_not_served_is_refused_by_name_with_what_to_do"
DRAFTS = (
    "untested: SGLang says \"STANDALONE speculative decoding is not supported by TuttiCpuPlatform on device 'cpu'\", "
    "and asks the same of EAGLE (speculative_hook.py:1066); PyTorch's attention is none that it drafts with "
    "(draft_utils.py:95)"
)
NGRAM = (
    "untested: SGLang's worker needs a CUDA library (speculative/ngram_worker.py:10, "
    "kernels/ops/speculative/reconstruct_tree.py:50); such drafts have no KV of their own"
)
LATENT_DP = (
    "untested: the built-in one is no model for it: SGLang's MiniCPM3 cuts its heads by all ranks, and adds up what "
    "ranks have computed of different tokens (models/minicpm3.py:123, :66)"
)
FEATURES = (
    ("attach, detach, status and clear over HTTP while requests run", "works", f"{HERE}/test_control.py"),
    (
        "weights from disk, tensors, another process group, or IPC, while serving",
        "works",
        f"{HERE}/test_control_weights.py",
    ),
    ("the same on two ranks: shards and replicas", "works", f"{HERE}/test_updating.py"),
    ("LoRA adapters, `cache_salt`, `extra_key`, by SGLang's keys", "works", "tests/regressions/test_key.py"),
    ("a server with LoRA adapters, from its launch and loaded later", "works", f"{HERE}/test_adapters.py"),
    ("two servers of a fleet, one on each path, in one conversation", "works", f"{HERE}/test_fleet.py"),
    ("a server of two ranks of which one loses its fleet", "works", f"{HERE}/test_fleet_ranks.py"),
    ("SGLang's fault and delay injector", "works", f"{HERE}/test_injected_faults.py"),
    ("a prefill and a decode server on one store", "works", f"{HERE}/test_disaggregation.py"),
    ("decode offload on two ranks, through SGLang's manager and controller", "works", f"{HERE}/test_decode_offload.py"),
    ("the direct path, TP 1 and 2, normal and overlap", "works", f"{HERE}/test_direct_end_to_end.py"),
    ("the direct path: MLA, a sliding window, Mamba2 beside attention", "works", f"{HERE}/test_direct_models.py"),
    (
        "the direct path on a drive that is slow, fails, or evicts what is loaded",
        "works",
        f"{HERE}/test_direct_faults.py",
    ),
    ("the direct path with attention DP, through the linker", "works", f"{HERE}/direct/test_ranks.py"),
    ("`sglang.Engine`, pages of one token", "works", f"{HERE}/test_end_to_end.py"),
    ("`--hicache-storage-backend dynamic`, buffer_only", "works", f"{HERE}/test_end_to_end.py"),
    ("TP, PP, attention CP, attention DP, through SGLang's tree and controller", "works", f"{HERE}/test_ranks.py"),
    ("a server of a latent model with attention DP", LATENT_DP, ""),
    ("drafts (EAGLE, MTP) beside a model, through SGLang's pools", "works", "tests/regressions/test_pool.py"),
    ("a server with EAGLE or another draft model", DRAFTS, ""),
    ("a server that drafts by n-grams", NGRAM, ""),
    ("heads stored at one TP size and read at another (`tp_lcm_size`)", "works", f"{HERE}/test_hicache.py"),
    ("sparse attention, DeepSeek-V4, MXFP8, NVFP4, through SGLang's pools", "works", f"{HERE}/test_codecs.py"),
    ("a server with one of these", "untested: their attention exists for GPUs only", ""),
    ("decode context parallelism", "refused", f"{HERE}/test_codecs.py::test_context_parallel_decoding_is_refused"),
    ("KV cache sharding, HiSparse, attaching to unified memory", "refused", REFUSED),
)
"""What is asked of a server beside its model and flags, what comes of it, and the test that shows it."""


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
    shown = [(what, how, f"`{test}`" if test else "-") for what, how, test in FEATURES]
    return _table(head, rows) + "\n## Beside the model\n\n" + _table(("what", "here", "shown by"), shown)


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


def run(case: Case) -> Outcome:
    """What comes of a case in the test that the page stands on."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        test = f"{TEST}::test_what_was_computed_comes_back[{case.name}]"
        command = [sys.executable, "-m", "pytest", test, "-m", "matrix", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, check=False)
        seen = next(ElementTree.parse(report).iter("testcase"))
    failure = next((child for child in seen if child.tag in ("failure", "error")), None)
    why = "" if failure is None else failure.get("message", "").splitlines()[0][:200]
    return Outcome(datetime.datetime.now(datetime.UTC).date().isoformat(), failure is None, _plain(case), why)


def main() -> None:
    """Run all cases, or those named; record and publish after each, so that a run that is stopped keeps what it saw."""
    for case in CASES:
        if not sys.argv[1:] or case.name in sys.argv[1:]:
            outcomes = {name: list(outcome) for name, outcome in {**recorded(), case.name: run(case)}.items()}
            RECORD.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
            PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
