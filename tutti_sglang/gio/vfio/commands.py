"""A queue pair that Python drives, one command at a time: the admin queue, and one for a store's own few blocks."""

import time
from typing import NamedTuple

import numpy as np

from tutti_sglang.gio import abi
from tutti_sglang.gio.vfio.device import Mapping
from tutti_sglang.memory import Region

ENTRIES = 16

_POLL_SECONDS = 20e-6


class Answer(NamedTuple):
    """`status`: 0 or SCT << 8 | SC, without the bits beyond; `result`: the completion's first word."""

    status: int
    result: int


class CommandQueue:
    """One command at a time; those whose answer did not come in time stay out, up to ENTRIES - 1."""

    def __init__(self, registers: Mapping, doorbell: int, stride: int) -> None:
        """`doorbell`: offset of the SQ's in the registers; the CQ's is `stride` bytes further. Its memory is not mapped
        yet."""
        self.memory = Region(2 * abi.PAGE)
        self._registers, self._doorbell, self._stride = registers, doorbell, stride
        self._sq = self.memory.view[: abi.PAGE].view("<u4").reshape(-1, 16)
        self._cq = self.memory.view[abi.PAGE :].view(abi.CQE_DTYPE)
        self.reset()

    def reset(self) -> None:
        """Begin anew, after the controller did."""
        self.memory.view[:] = 0  # stale phase bits would be answers
        self._tail = self._head = self._cid = self._out = 0
        self._phase = 1

    def carry_out(
        self, words: dict[int, int], opcode: int, nsid: int, data: tuple[int, int], timeout: float
    ) -> Answer | None:
        """`words`: number → content of CDW10 … 15, the others are 0; `data`: PRP1 and PRP2. None when there is no
        answer within `timeout` seconds."""
        if self._out == ENTRIES - 1:
            return None
        entry = self._sq[self._tail]
        entry[:] = 0
        self._cid = (self._cid + 1) & 0xFFFF
        entry[0], entry[1] = opcode | self._cid << 16, nsid
        entry[6:10] = np.array(data, dtype="<u8").view("<u4")
        for number, word in words.items():
            entry[number] = word
        self._out += 1
        self._tail = (self._tail + 1) % ENTRIES
        self._registers.write(self._doorbell, self._tail)
        until = time.monotonic() + timeout
        while (answer := self._take()) is None or answer[0] != self._cid:
            if answer is None and time.monotonic() > until:
                return None
            time.sleep(_POLL_SECONDS)
        return answer[1]

    def _take(self) -> tuple[int, Answer] | None:
        """The next answer, and whose it is."""
        entry = self._cq[self._head]
        last = int(entry["last"])
        if last >> 16 & 1 != self._phase:
            return None
        answer = Answer(last >> 17 & 0x7FF, int(entry["dw0"]))
        self._out -= 1
        self._head = (self._head + 1) % ENTRIES
        self._phase ^= self._head == 0
        self._registers.write(self._doorbell + self._stride, self._head)
        return last & 0xFFFF, answer
