"""What a step of the scheduler means for writes. Pure."""

import enum

FOREVER = 1 << 62
"""A time (ns) that never comes."""

LONGEST_STEP = 1.0
"""Seconds for which a step is believed to run on without being heard of again."""


class Mode(enum.IntEnum):
    """What the scheduler runs. OTHER: something of which nothing is known."""

    OTHER = 0
    PREFILL = 1
    DECODE = 2
    IDLE = 3


def writes_until(mode: Mode, now: int, slack: float) -> int:
    """Until when (ns) writes may start in a step that begins `now`: a prefill brings reads and fills the links, so only
    in the `slack` seconds that were measured for it; decode steps are long in number and light on the links."""
    return now + int(slack * 1e9) if mode is Mode.PREFILL else FOREVER


def heard_until(now: int, expected: float) -> int:
    """The moment (ns) that counts as the latest sign of a scheduler that starts a step of `expected` seconds."""
    return now + int(min(expected, LONGEST_STEP) * 1e9)
