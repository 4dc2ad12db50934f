"""Trying drives that are out of service: a file of their own is written, or read and compared, through the engine."""

import os
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tutti_sglang.engine.batch import IN_PROGRESS, IOCTX_DTYPE, IoClass, Operation, Ticket
from tutti_sglang.engine.staging import Extent
from tutti_sglang.memory import view
from tutti_sglang.store import probe
from tutti_sglang.store.drives import SILENT, Drive
from tutti_sglang.store.health import Health
from tutti_sglang.store.parts import Parts

SEGMENT = 0
"""The engine knows the file under this number; real segments begin with 1."""

PATIENCE = 5.0
"""Seconds that a drive may take."""


@dataclass(slots=True)
class _Attempt:
    """One I/O; `judged` once its outcome is known or it took too long."""

    health: Health
    operation: Operation
    extent: Extent
    ticket: Ticket
    deadline: float
    judged: bool = False


@dataclass(slots=True)
class _Trial:
    """The attempts at one drive; it ends when the drive has answered all of them, however late."""

    fd: int
    attempts: list[_Attempt] = field(default_factory=list)


class Revival:
    """Used by the writer thread. `tick` starts what is due and looks at what is under way; it waits for nothing."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._trials: dict[int, _Trial] = {}
        self._told: dict[int, str] = {}

    def tick(self) -> None:
        """OSError, EngineError."""
        for ordinal, drive in self._parts.drives.items():
            problem = self._problem(drive)
            if problem:
                self._absent(drive, problem)
                continue
            self._told.pop(ordinal, None)
            if ordinal in self._trials:
                self._look(ordinal, drive)
            elif drive.reads.due() or drive.writes.due():
                self._start(ordinal, drive)

    def _problem(self, drive: Drive) -> str:
        try:
            return "" if drive.present() else "its directory was deleted, or another one stands in its place"
        except OSError:
            return SILENT

    def _absent(self, drive: Drive, why: str) -> None:
        if self._told.get(drive.ordinal) != why:
            self._told[drive.ordinal] = why
            self._parts.reporter.warn(f"gone {drive.ordinal} {why}", f"{drive.path} is out of service: {why}")
        for health in (drive.reads, drive.writes):
            if not health.hang(why) and health.due():
                health.tried(False)
        self._parts.ledger.show(drive)

    def _start(self, ordinal: int, drive: Drive) -> None:
        due = [(drive.reads, Operation.READ), (drive.writes, Operation.WRITE)]
        due = [(health, operation) for health, operation in due if health.due()]
        writing = any(operation is Operation.WRITE for _, operation in due)
        try:
            fd = drive.ask(partial(probe.open_check, drive.segments, writing, drive.direct), undo=os.close)
        except OSError:
            for health, _ in due:
                health.tried(False)
            return
        self._parts.engine.attach(ordinal, SEGMENT, fd)
        trial = self._trials[ordinal] = _Trial(fd)
        for health, operation in due:
            extent = self._parts.staging.acquire(len(probe.PATTERN))
            if extent is None:
                continue  # staging is full: the next tick finds the trial ended and begins again
            memory = view(extent.address, extent.size)
            memory[:] = probe.PATTERN if operation is Operation.WRITE else 0
            batch = np.zeros(1, dtype=IOCTX_DTYPE)
            batch["address"], batch["length"], batch["drive"] = extent.address, extent.size, ordinal
            batch["operation"], batch["class"] = operation, IoClass.WRITE
            deadline = time.monotonic() + PATIENCE
            ticket = self._parts.engine.submit(batch, IoClass.WRITE, deadline, self._parts.staging)
            trial.attempts.append(_Attempt(health, operation, extent, ticket, deadline))

    def _look(self, ordinal: int, drive: Drive) -> None:
        trial = self._trials[ordinal]
        for attempt in list(trial.attempts):
            (result,) = self._parts.engine.wait(attempt.ticket, 0).tolist()
            if result == IN_PROGRESS:
                if not attempt.judged and time.monotonic() > attempt.deadline:
                    attempt.judged = True
                    attempt.health.tried(False)
                continue
            if not attempt.judged:
                self._judge(drive, attempt, result)
            self._parts.staging.release(attempt.extent)
            trial.attempts.remove(attempt)
        if not trial.attempts and self._parts.engine.detach(ordinal, SEGMENT, 0):
            drive.close_file(trial.fd)
            del self._trials[ordinal]

    def _judge(self, drive: Drive, attempt: _Attempt, result: int) -> None:
        read = view(attempt.extent.address, attempt.extent.size)
        works = result == attempt.extent.size and bool((read == probe.PATTERN).all())
        attempt.health.tried(works)
        if works:
            name = attempt.operation.name.lower()
            self._parts.reporter.warn(f"back {drive.ordinal} {name}", f"{drive.path} serves {name}s again")
            self._parts.ledger.show(drive)
