"""The cycle of a new segment: drives in proportion to their room. Pure arithmetic."""

import math

WEIGHT_MAX = 4
"""How often a drive may occur in a cycle. One with less than an eighth of the largest room is left out until the others
have filled up."""


def weights(room: dict[int, int], segment_size: int, most: int = WEIGHT_MAX) -> dict[int, int]:
    """Drive → how often it occurs, `most` times at most: in proportion to its `room` in bytes, and so that the segment
    fits. Empty when no drive has room for one."""
    room = {drive: free for drive, free in room.items() if free > 0}
    while room:
        largest = max(room.values())
        share = {drive: round(most * free / largest) for drive, free in room.items()}
        share = {drive: weight for drive, weight in share.items() if weight}
        divisor = math.gcd(*share.values())
        share = {drive: weight // divisor for drive, weight in share.items()}
        place = segment_size // max(share.values())
        if all(weight * place <= room[drive] for drive, weight in share.items()):
            return share
        del room[min(share, key=lambda drive: room[drive] / share[drive])]
    return {}


def spread(share: dict[int, int]) -> tuple[int, ...]:
    """The cycle in which each drive occurs as often as `share` says, evenly spread: {0: 2, 1: 1} → (0, 1, 0)."""
    places = [((2 * turn + 1) / (2 * weight), drive) for drive, weight in share.items() for turn in range(weight)]
    return tuple(drive for _, drive in sorted(places))
