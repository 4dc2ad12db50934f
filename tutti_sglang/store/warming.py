"""What the first get of a process would pay for, done before it comes."""

from tutti_sglang.store.keys import KEY_SIZE
from tutti_sglang.store.parts import Parts
from tutti_sglang.store.sight import look, spot
from tutti_sglang.store.space import Space

KEYS = bytes(2 * KEY_SIZE)
"""Of no object. Two, for a single key takes other ways."""


def warm(parts: Parts, space: Space) -> None:
    """Ask the index once, and open the newest segment on each drive: with the first file a drive gets its ring and
    thread, and these register the first piece of staging. StoreError."""
    spot(parts, space, KEYS)
    look(parts, space, KEYS)
    with parts.segments.use(_newest(parts, space)):
        pass


def _newest(parts: Parts, space: Space) -> list[int]:
    """Segments that have a file on each drive between them; where the namespace has none, another's will do."""
    chosen, left = [], set(parts.drives)
    for row in sorted(parts.segments.rows(), key=lambda row: (row.namespace != space.id, -row.id)):
        if left & set(row.cycle) and parts.segments.readable(row.id):
            chosen.append(row.id)
            left -= set(row.cycle)
    return chosen
