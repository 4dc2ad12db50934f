"""What every benchmark prints and keeps: the machine, the settings, all rounds, and medians of per-round ratios."""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from tutti_sglang.units import format_size

T = TypeVar("T")
Row = dict[str, Any]
PACKAGES = ("tutti-sglang", "sglang", "torch", "numpy", "nixl", "nixl-cu13", "lmcache")
console = Console(soft_wrap=True)


class Machine(msgspec.Struct, frozen=True):
    """Where it ran. `disk` and `file_system` are those below the directory that was measured."""

    cpu: str
    cores: int
    memory: str
    kernel: str
    disk: str
    file_system: str
    load: float
    versions: dict[str, str]

    def lines(self) -> list[str]:
        """Three lines for a person."""
        return [
            f"{self.cpu}, {self.cores} cores, {self.memory}, {self.kernel}, load {self.load:.1f} at the start",
            f"{self.disk}, {self.file_system}",
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        ]


class Report(msgspec.Struct):
    """One run.

    `contenders`: which way the bytes of each really went; `rows`: one flat record per measurement, every round of it;
    `notes`: what was left out, and why.
    """

    benchmark: str
    machine: Machine
    settings: dict[str, Any]
    date: str = ""
    command: str = ""
    commit: str = ""
    contenders: dict[str, str] = {}
    rows: list[Row] = []
    summary: list[Row] = []
    notes: list[str] = []

    def __post_init__(self) -> None:
        self.date = self.date or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.command = self.command or f"python -m benchmarks.{self.benchmark} {' '.join(sys.argv[1:])}".strip()
        self.commit = self.commit or _first_line("git", "describe", "--always", "--dirty", "--abbrev=12")

    def head(self) -> None:
        """Print date, command, machine and settings."""
        console.print(f"[bold]{self.benchmark}[/bold] {self.date} commit {self.commit or 'unknown'}\n{self.command}")
        for line in self.machine.lines():
            console.print(line, highlight=False)
        console.print(", ".join(f"{name} {value}" for name, value in self.settings.items()), highlight=False)

    def note(self, text: str, error: BaseException | None = None) -> None:
        """Print something that the reader must know, and keep it; of an error, its last line."""
        why = str(error).strip() if error else ""
        self.notes.append(f"{text}: {why.splitlines()[-1]}" if why else text)
        console.print(f"note: {text}{f': {why}' if why else ''}", highlight=False, markup=False)

    def markdown(self) -> str:
        """Where and how it ran, for a document."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        lines = [
            f"`{self.command}`, {self.date}, commit {self.commit or 'unknown'}",
            *self.machine.lines(),
            settings,
            *(f"{name}: {way}" for name, way in self.contenders.items()),
            *self.notes,
        ]
        return "\n".join(f"- {line}" for line in lines) + "\n"

    def write(self, path: Path | None) -> None:
        """Write the whole run as JSON, where a file was asked for."""
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))


class Quartiles(NamedTuple):
    """Lower quartile, median and upper quartile."""

    low: float
    median: float
    high: float

    def show(self, pattern: str = "{:.2f}") -> str:
        """`median (low to high)`."""
        low, median, high = (pattern.format(value) for value in self)
        return f"{median} ({low} to {high})"


def quartiles(values: Iterable[float]) -> Quartiles | None:
    """Of at least one value; None of none."""
    found = sorted(values)
    if len(found) < 2:
        return Quartiles(*(found * 3)) if found else None
    return Quartiles(*statistics.quantiles(found, n=4, method="inclusive"))


def ratios(
    rows: Iterable[Row], of: Callable[[Row], float | None], against: Callable[[Row], float | None]
) -> list[float]:
    """Per round, the value of one contender over that of another: only what ran next to each other is compared."""
    rounds: dict[int, list[float | None]] = {}
    for row in rows:
        pair = rounds.setdefault(row["round"], [None, None])
        for place, pick in enumerate((of, against)):
            value = pick(row)
            pair[place] = pair[place] if value is None else value
    return [top / bottom for top, bottom in rounds.values() if top is not None and bottom]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The order of round `turn`: everybody is first once in len(items) rounds."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


class Figures(NamedTuple):
    """A table; the first column is text, the rest are figures."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]

    def show(self) -> None:
        """Print it for a terminal; a narrow one is not obeyed, for half a figure is none."""
        shown = Table(title=self.title, title_justify="left", header_style="bold")
        for place, column in enumerate(self.columns):
            shown.add_column(column, justify="right" if place else "left", no_wrap=True)
        for line in self.lines:
            shown.add_row(*line)
        Console(width=max(console.width, 160)).print(shown)

    def markdown(self) -> str:
        """The same for a document."""
        rows = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.lines]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with what every benchmark takes."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    result.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    result.add_argument("--seed", type=int, default=1, help="of all synthetic data")
    return result


def machine(directory: Path) -> Machine:
    """This machine, with the drive and file system below `directory`."""
    disk, file_system = _storage(directory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory=format_size(memory),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        disk=disk,
        file_system=file_system,
        load=os.getloadavg()[0],
        versions={"python": platform.python_version(), **_versions()},
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    fio = _first_line("fio", "--version")
    return found | ({"fio": fio.removeprefix("fio-")} if fio else {})


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine()


def _storage(directory: Path) -> tuple[str, str]:
    """What /sys knows of the block device below, and the mount: `vda 256GiB, queue none`, `ext4 on / (rw,relatime)`."""
    place = directory.resolve()
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [m for m in mounts if place.is_relative_to(m[4])]
    mount = max(inside, key=lambda m: len(m[4]))  # the last of equal length hides the others
    mount = [m for m in inside if m[4] == mount[4]][-1]
    kind = mount[mount.index("-") + 1]
    block = Path(f"/sys/dev/block/{mount[2]}")
    file_system = f"{kind} on {mount[4]} ({mount[5]})"
    if not block.exists():
        return f"{kind}, no block device", file_system
    block = block.resolve()
    whole = block if (block / "queue").exists() else block.parent
    model = _read(whole / "device/model") or _read(whole / "device/device/model") or "no model name"
    size = format_size(int(_read(whole / "size") or 0) * 512)
    scheduler = (_read(whole / "queue/scheduler").partition("[")[2]).partition("]")[0] or "none"
    return f"{whole.name} ({model}, {size}, scheduler {scheduler})", file_system


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()
