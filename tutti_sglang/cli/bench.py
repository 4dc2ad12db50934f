"""`tutti bench`: what the store gets out of a drive, beside what fio gets, in interleaved rounds."""

import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti_sglang.cli.console import Answer, answer, progress
from tutti_sglang.cli.fio import Fio
from tutti_sglang.cli.options import Json
from tutti_sglang.config import load_config
from tutti_sglang.errors import ConfigError, StoreError
from tutti_sglang.store import Namespace, ObjectStore
from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.scratch import Scratch
from tutti_sglang.units import format_size, parse_size

TENSOR = 64 << 10
"""Bytes of a tensor of the objects: one layer's K of 64 tokens of an 8B model is 128 KiB."""
SPARE = 1 << 30
"""Bytes that stay free beside the scratch store."""

Figures = dict[str, list[float]]


def bench(
    directory: Annotated[
        Path, typer.Option("--dir", "-d", help="A directory on the drive; a scratch store is made in it.")
    ],
    object_size: Annotated[str, typer.Option(help="Bytes of an object (a page of all layers).")] = "2MiB",
    size: Annotated[str, typer.Option(help="Bytes that are written and read in a round.")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median decides.")] = 5,
    json: Json = False,
) -> None:
    """Write and read a scratch store on this drive, and the same bytes with fio where it is installed.

    The other storage backends are compared by `python -m benchmarks.storage` of the source tree.

    Example: tutti bench --dir /mnt/nvme0 --object-size 2MiB
    """

    def act(console: Console) -> Answer:
        page, total = parse_size(object_size), parse_size(size)
        if page % TENSOR or not TENSOR <= page <= total:
            raise ConfigError(f"object-size must be a multiple of {format_size(TENSOR)}, and at most size")
        with _scratch(directory, 2 * total) as folder:
            figures, about = _rounds(console, folder, page, total // page, rounds)
        data = summary(figures)
        _show(console, data, f"{format_size(page)} x {total // page}, {rounds} rounds; {about}")
        return Answer({"setting": about, "object_size": page, "rounds": figures, "median": data})

    answer("bench", json, act)


@contextmanager
def _scratch(directory: Path, need: int) -> Iterator[Path]:
    if not directory.is_dir():
        raise StoreError(f"{directory} is not a directory", "Name a directory on the drive to measure")
    free = shutil.disk_usage(directory).free
    if free < 2 * need + SPARE:
        raise StoreError(f"{directory} has only {format_size(free)} free", "Give a smaller --size")
    try:
        folder = Path(tempfile.mkdtemp(prefix=".tutti-bench-", dir=directory))
    except OSError as error:
        raise StoreError(f"{directory} cannot be written to ({error.strerror})", f"ls -ld {directory}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rounds(console: Console, folder: Path, page: int, pages: int, rounds: int) -> tuple[Figures, str]:
    """Seconds per round and contender; the order turns from round to round."""
    settings = {"storage_dirs": [str(folder / "store")], "min_free_space": 0, "segment_size": "64MiB"}
    store = ObjectStore(load_config(settings, {}).config)
    try:
        contenders = _Store(store, page, pages).contenders()
        about = store.describe()
        if shutil.which("fio"):
            fio = Fio(folder / "fio", page, pages, {})
            contenders |= {
                "fio write": lambda: fio.measure("put", "idle")["seconds"],
                "fio read": lambda: fio.measure("get", "idle")["seconds"],
            }
            about += f"; fio {fio.description}"
        else:
            about += "; fio is not installed (apt-get install fio): no baseline"
        figures: Figures = {name: [] for name in contenders}
        names = list(contenders)
        with progress("bench", console) as advance:
            for number in range(rounds):
                turned = names[number % len(names) :] + names[: number % len(names)]
                for done, name in enumerate(turned):
                    figures[name].append(page * pages / contenders[name]() / 1e9)
                    advance(number * len(names) + done + 1, rounds * len(names))
        return figures, about
    finally:
        store.close()


class _Store:
    """Objects in memory, put under new names and read back."""

    def __init__(self, store: ObjectStore, page: int, pages: int) -> None:
        self._store, self._pages = store, pages
        tensors = (TENSOR,) * (page // TENSOR)
        namespace = Namespace(model="bench", weights="", dtype="u1", page_size=1, layers=(0, 1), tensors=tensors)
        self._objects = Scratch(store, namespace, pages)
        self._keys = b""

    def contenders(self) -> dict[str, Callable[[], float]]:
        """Each does one round and returns its seconds."""
        self.write()  # what is read in the first round must be there
        return {"store write": self.write, "store read": self.read}

    def write(self) -> float:
        """Until all is on the drive."""
        self._objects.clear()
        self._keys = b"".join(secrets.token_bytes(KEY_SIZE) for _ in range(self._pages))
        began = time.perf_counter()
        if not (self._objects.put(self._keys) and self._store.drain(60)):
            raise StoreError("Not all objects could be written", "Is the drive full or failing? See: dmesg | tail")
        return time.perf_counter() - began

    def read(self) -> float:
        """With checksums, into memory."""
        began = time.perf_counter()
        if not self._objects.get(self._keys):
            raise StoreError("Not all objects came back", "Is the drive failing? See: dmesg | tail")
        return time.perf_counter() - began


def summary(figures: Figures) -> dict[str, Any]:
    """Medians in GB/s, and of the ratios to fio in the same round."""
    found: dict[str, Any] = {name: statistics.median(each) for name, each in figures.items()}
    for way in ("write", "read"):
        if baseline := figures.get(f"fio {way}"):
            ratios = [ours / theirs for ours, theirs in zip(figures[f"store {way}"], baseline, strict=True)]
            found[f"{way} of fio"] = statistics.median(ratios)
    return found


def _show(console: Console, data: dict[str, Any], title: str) -> None:
    table = Table("", "GB/s", "of fio", show_edge=False)
    for way in ("write", "read"):
        share = data.get(f"{way} of fio")
        table.add_row(f"store {way}", f"{data[f'store {way}']:.2f}", "" if share is None else f"{share:.0%}")
        if share is not None:
            table.add_row(f"fio {way}", f"{data[f'fio {way}']:.2f}", "")
    console.print(title)
    console.print(table)
