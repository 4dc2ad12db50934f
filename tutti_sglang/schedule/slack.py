"""How long prefills take here, and how much I/O they hide: measured by a profile, refined by every real step.

A step of n new tokens that attend to p earlier ones each costs about a + b·n + c·n·(p + n/2): what does not depend on
tokens, what is linear in them (projections, MLP), attention. The three are fitted to the medians of what was measured
in cells of a half octave in n and p; in a cell that was measured, its median corrects the fit.
"""

import contextlib
import math
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

VERSION = 1
SAMPLES = 9
"""Of a cell, the latest are kept: a machine that changed is believed after five."""

LATEST = 5
"""Likewise of loads: three are believed."""

FEW, SHAPES = 6, 3
"""Samples in all, and cells, below which nothing is claimed."""

NOTED = 256
"""Steps that wait to be learned from; of more, the oldest are dropped."""

MOST_BYTES = 1 << 60
"""Of a load: more is nonsense from a damaged file, and no float either."""

FREE = 0.03
"""A step that I/O beside it lengthens by less than this share hides the I/O."""

_Array = npt.NDArray[np.float64]


class Cell(msgspec.Struct):
    """Prefills of about equal shape. `beside`: their seconds while the drives were busy."""

    new: float
    prefix: float
    seconds: list[float] = msgspec.field(default_factory=list)
    beside: list[float] = msgspec.field(default_factory=list)


class Saved(msgspec.Struct):
    """The file: what was measured, and of what."""

    version: int
    identity: dict[str, str]
    cells: list[Cell]


class Table:
    """For one scheduler thread; others may ask. Times in seconds."""

    def __init__(self, identity: dict[str, str]) -> None:
        """`identity`: model, device, parallelism, SGLang's version: a table of anything else says nothing here."""
        self.identity = identity
        self.count = 0
        self._cells: dict[tuple[int, int], Cell] = {}
        self._noted: deque[tuple[int, float, float, bool]] = deque(maxlen=NOTED)
        self._fit: tuple[float, float, float] | None = None
        self._fitted = 0
        self._beside = False

    @property
    def known(self) -> bool:
        """Whether `expected` says anything."""
        return self.count >= FEW and len(self._cells) >= SHAPES

    def note(self, new: int, prefix: float, seconds: float, *, beside: bool = False) -> None:
        """As `observe`, later: for a thread that has no time."""
        self._noted.append((new, prefix, seconds, beside))

    def learn(self) -> None:
        """Take in what was noted. More than one thread may be at it."""
        with contextlib.suppress(IndexError):
            while True:
                new, prefix, seconds, beside = self._noted.popleft()
                self.observe(new, prefix, seconds, beside=beside)

    def observe(self, new: int, prefix: float, seconds: float, *, beside: bool = False) -> None:
        """A prefill took so long, `beside` busy drives or alone (or who knows)."""
        if new <= 0 or not 0 < seconds < math.inf:
            return
        cell = self._cells.setdefault(_place(new, prefix), Cell(float(new), float(prefix)))
        samples = cell.beside if beside else cell.seconds
        self._beside |= beside
        samples.append(seconds)
        del samples[:-SAMPLES]
        if not beside:
            weight = 1 / len(samples)
            cell.new += (new - cell.new) * weight
            cell.prefix += (prefix - cell.prefix) * weight
            self.count += 1

    def expected(self, new: int, prefix: float) -> float:
        """Seconds of a prefill of `new` tokens on `prefix` tokens; 0 while too little is known."""
        if new <= 0 or not self.known:
            return 0.0
        a, b, c = self._coefficients()
        fitted = a + b * new + c * new * (prefix + new / 2)
        cell = self._cells.get(_place(new, prefix))
        if not cell or not cell.seconds:
            return fitted
        there = a + b * cell.new + c * cell.new * (cell.prefix + cell.new / 2)
        return fitted * _median(cell.seconds) / there if there > 0 else _median(cell.seconds)

    def roughly(self, new: int, prefix: float) -> float:
        """As `expected`, by the fit alone: for a thread that has no time."""
        if not self._fit:
            return 0.0
        a, b, c = self._fit
        return a + b * new + c * new * (prefix + new / 2)

    def recompute(self, new: int, prefix: int, chunk: int) -> float:
        """Seconds to compute `new` tokens after `prefix`, at most `chunk` in a step (0: in one)."""
        total, done = 0.0, 0
        while done < new:
            part = min(new - done, chunk or new)
            total += self.expected(part, prefix + done)
            done += part
        return total

    @property
    def hides(self) -> bool:
        """Whether any prefill was measured beside busy drives."""
        return self._beside

    def measured(self, new: int, prefix: float) -> bool:
        """Whether such a prefill was measured alone and beside busy drives: then `slack` says something."""
        cell = self._cells.get(_place(new, prefix))
        return cell is not None and bool(cell.beside and cell.seconds)

    def slack(self, new: int, prefix: float) -> float:
        """Seconds of such a prefill in which I/O costs it nothing; 0 unless that was measured."""
        if not self._beside:
            return 0.0
        cell = self._cells.get(_place(new, prefix))
        if not cell or not cell.beside or not cell.seconds:
            return 0.0
        alone = _median(cell.seconds)
        return alone if _median(cell.beside) <= (1 + FREE) * alone else 0.0

    def rows(self) -> list[tuple[float, float, float, float]]:
        """(new, prefix, seconds, slack) of each cell that was measured, in order."""
        cells = sorted(
            (cell for cell in self._cells.values() if cell.seconds), key=lambda each: (each.prefix, each.new)
        )
        return [
            (each.new, each.prefix, _median(each.seconds), self.slack(int(each.new), each.prefix)) for each in cells
        ]

    def save(self, folder: Path) -> Path:
        """Write it where `load` finds it, all or nothing. OSError."""
        self.learn()
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{digest(self.identity)}.json"
        saved = Saved(VERSION, self.identity, list(self._cells.values()))
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1))
        temporary.rename(path)
        return path

    @classmethod
    def load(cls, folder: Path, identity: dict[str, str]) -> "Table":
        """The table of this identity; an empty one where there is none that can be read."""
        table = cls(identity)
        try:
            saved = msgspec.json.decode((folder / f"{digest(identity)}.json").read_bytes(), type=Saved)
        except (OSError, msgspec.DecodeError, RecursionError):
            return table
        if saved.version == VERSION and saved.identity == identity:
            cells = [cell for cell in saved.cells if _sound(cell)]
            table._cells = {_place(cell.new, cell.prefix): cell for cell in cells}
            table.count = sum(len(cell.seconds) for cell in cells)
            table._beside = any(cell.beside for cell in cells)
        return table

    def _coefficients(self) -> tuple[float, float, float]:
        if self._fit is None or self.count >= 1.2 * self._fitted:
            self._fit, self._fitted = _fitted([cell for cell in self._cells.values() if cell.seconds]), self.count
        return self._fit


def digest(identity: dict[str, str]) -> str:
    """32 hex digits."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(sorted(identity.items())))


def _sound(cell: Cell) -> bool:
    """Whether it can have been measured: a file that somebody else spoiled must not spoil a decision."""
    shape = 0 < cell.new < MOST_BYTES and 0 <= cell.prefix < MOST_BYTES
    return shape and all(0 < seconds < math.inf for seconds in (*cell.seconds, *cell.beside))


def _place(new: float, prefix: float) -> tuple[int, int]:
    return round(2 * math.log2(max(new, 1))), round(2 * math.log2(prefix + 64)) if prefix > 0 else 0


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _fitted(cells: list[Cell]) -> tuple[float, float, float]:
    """The three costs, none negative, by least squares of relative errors."""
    new = np.array([cell.new for cell in cells])
    prefix = np.array([cell.prefix for cell in cells])
    seconds = np.array([_median(cell.seconds) for cell in cells])
    columns = np.stack([np.ones_like(new), new, new * (prefix + new / 2)], axis=1) / seconds[:, None]
    used = [0, 1, 2]
    while True:
        solved = _solve(columns[:, used])
        if (solved >= 0).all() or len(used) == 1:
            break
        used.pop(int(solved.argmin()))
    result = [0.0, 0.0, 0.0]
    for place, value in zip(used, solved.tolist(), strict=True):
        result[place] = max(0.0, value)
    return result[0], result[1], result[2]


def _solve(columns: _Array) -> _Array:
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    solved = np.linalg.lstsq(columns / scale, np.ones(len(columns)), rcond=None)[0] / scale
    return np.asarray(solved, np.float64)


class Curve:
    """Seconds to load so many bytes, from the loads that were seen: the median of the latest in each octave of size.
    Where a small load now takes longer than a large one did, or a large one less than a small one did, the older figure
    is out of date and is forgotten.

    Thread safe enough: one adds, others ask."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: dict[int, deque[tuple[float, float]]] = {}

    def observe(self, nbytes: float, seconds: float) -> None:
        """A load of `nbytes` took so long."""
        if not (0 < nbytes < MOST_BYTES and 0 < seconds < math.inf):
            return
        octave = round(math.log2(nbytes))
        samples = self._seen.get(octave) or deque(maxlen=LATEST)
        samples.append((nbytes, seconds))
        self._seen[octave] = samples  # last: who asks meanwhile must find none that is empty
        self.count += 1
        _, now = _middle(list(samples))
        for other in [each for each in self._seen if each != octave]:
            _, then = _middle(list(self._seen[other]))
            if (then < now) == (other > octave) and then != now:
                del self._seen[other]

    def expected(self, nbytes: float) -> float:
        """Seconds for `nbytes`: between sizes that were seen by a straight line, beyond them by the nearest speed; 0 of
        nothing, and where nothing is known."""
        if nbytes <= 0 or not self._seen:
            return 0.0
        points = sorted(_middle(list(samples)) for samples in list(self._seen.values()))
        sizes, times = [size for size, _ in points], list(np.maximum.accumulate([time for _, time in points]))
        if nbytes <= sizes[0]:
            return float(times[0])  # a small load waits as long as the smallest that was seen, or less
        if nbytes >= sizes[-1]:
            return float(times[-1] * nbytes / sizes[-1])
        return float(np.interp(nbytes, sizes, times))


def _middle(samples: list[tuple[float, float]]) -> tuple[float, float]:
    sizes, times = zip(*samples, strict=True)
    return _median(list(sizes)), _median(list(times))
