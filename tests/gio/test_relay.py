"""The relay tells a controller of everything that a mover announces; words of memory take the place of registers."""

import contextlib
import ctypes
import time
from copy import copy
from pathlib import Path

import numpy as np

from tutti_sglang.gio import abi
from tutti_sglang.gio.controller import Service
from tutti_sglang.gio.queues import HostMemory
from tutti_sglang.gio.relay import Relay
from tutti_sglang.gio.twin import Bell, Pace, Twin
from tutti_sglang.memory import view
from tutti_sglang.testing.gio_rig import GioRig, Shape


def test_a_mover_that_reaches_no_register_reads_every_byte(native: ctypes.CDLL, tmp_path: Path) -> None:
    memory = HostMemory()
    rig = GioRig(tmp_path, native, memory, Shape(pairs=2, log_entries=2), Service(idle_seconds=1e-3))
    registers = np.stack([rig.pairs.table["sq_doorbell"], rig.pairs.table["cq_doorbell"]], axis=1)
    words = copy(rig.pairs)
    words.table = rig.pairs.table.copy()
    far = memory.shared(4096).address + np.arange(4, dtype=np.uint64).reshape(2, 2) * np.uint64(64)
    words.table["sq_doorbell"], words.table["cq_doorbell"] = far[:, 0], far[:, 1]
    drives = view(int(rig.ring.context["drives"][0]), abi.DRIVE_DTYPE.itemsize).view(abi.DRIVE_DTYPE)
    movers = view(int(drives["queues"][0]), words.table.nbytes).view(abi.PAIR_DTYPE)
    movers[:] = words.table

    with contextlib.ExitStack() as ends:
        ends.callback(rig.controller.close, 10)
        relay = Relay(native, words, registers.tolist())
        ends.callback(relay.close)
        bell = Bell(native)
        ends.callback(bell.close)
        twin = Twin(native, rig.ring, [relay], bell, Pace(window=16, workers=2, poll_seconds=1e-4))
        ends.callback(twin.close, 10)
        rng = np.random.default_rng(1)
        for _ in range(20):  # rings of 4 entries come round many times
            batch = rig.random_batch(rng, alignment=4)
            assert (rig.run(batch) == batch["length"]).all()
            assert all((rig.in_memory(batch, i) == rig.expected(batch, i)).all() for i in range(len(batch)))
        assert relay.rings() > 20
        until = time.monotonic() + 60
        while any(
            value(word) != value(register) for word, register in zip(far.ravel(), registers.ravel(), strict=True)
        ):
            assert time.monotonic() < until, "the last words were not relayed"
            time.sleep(0.001)


def value(address: np.uint64) -> int:
    return int(view(int(address), 4).view(np.uint32)[0])
