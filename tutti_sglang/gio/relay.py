"""The relay: a native thread that rings a drive's doorbells for a mover that cannot reach its registers."""

import ctypes
from collections.abc import Sequence

import numpy as np

from tutti_sglang.gio import abi
from tutti_sglang.gio.queues import QueuePairs


class Relay:
    """Copies the doorbell words of `pairs` to registers: one 4-byte store on the bus per change."""

    def __init__(
        self,
        native: ctypes.CDLL,
        pairs: QueuePairs,
        doorbells: Sequence[tuple[int, int]],
        *,
        spin_seconds: float = 1e-3,
        idle_seconds: float = 1e-2,
    ) -> None:
        """`doorbells`: addresses of the SQ and CQ registers of each pair; after `spin_seconds` without news it sleeps
        for `idle_seconds` at a time, unless it is woken. A GPU cannot wake it: spin for as long as its kernels run."""
        assert len(doorbells) == len(pairs.table)
        lines = np.zeros(2 * len(doorbells), dtype=abi.RELAY_DTYPE)
        lines["word"] = np.stack([pairs.table["sq_doorbell"], pairs.table["cq_doorbell"]], axis=1).reshape(-1)
        lines["doorbell"] = np.array(doorbells, dtype=np.uint64).reshape(-1)
        self._native, self._pairs = native, pairs
        self._handle = native.gio_relay_new(
            lines.ctypes.data, len(lines), round(spin_seconds * 1e9), round(idle_seconds * 1e9)
        )

    @property
    def endpoint(self) -> int:
        """As twin.Endpoint."""
        return int(self._native.gio_relay_endpoint(self._handle))

    def wake(self) -> None:
        """Look for news now."""
        self._native.gio_relay_wake(self._handle)

    def rings(self) -> int:
        """How many times it has rung."""
        return int(self._native.gio_relay_rings(self._handle))

    def close(self) -> None:
        """Stop, before the registers go."""
        if self._handle:
            self._native.gio_relay_delete(self._handle)
            self._handle = None
