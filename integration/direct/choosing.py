"""Which mover carries the bytes on this machine: the best that works, and why it is no better one."""

from collections.abc import Iterable
from typing import Any

import torch

from tutti_sglang.errors import EngineError, UnsupportedError
from tutti_sglang.integration.direct.gds import GdsMover
from tutti_sglang.integration.direct.movers import GioMover, HostMover, Mover, StreamMover
from tutti_sglang.integration.direct.pools import DevicePool, is_reachable
from tutti_sglang.kernels import gds

PAYS = (gds.Mode.NVIDIA_FS, gds.Mode.P2PDMA)
"""In other modes cuFile goes through host memory, as the stream mover does without it."""


def choose_mover(pools: Iterable[DevicePool], engine: str, forward_stream: Any = None) -> Mover:
    """The best mover for these pools on this machine; `engine`: the setting. UnsupportedError says what is missing,
    EngineError what does not work."""
    pools = list(pools)
    if all(map(is_reachable, pools)):
        return GioMover() if engine == "gio" else HostMover()
    devices = {buffer.device for pool in pools for buffer in pool.view.buffers}
    if len(devices) == 1 and (device := devices.pop()).type == "cuda":
        return of_device(pools, device, engine, forward_stream)
    raise UnsupportedError(
        f"The direct path has no mover for memory of {', '.join(sorted(map(str, devices)))}",
        'Set "path": "host" in the extra config',
    )


def of_device(pools: list[DevicePool], device: torch.device, engine: str, forward_stream: Any = None) -> Mover:
    """GPUDirect Storage where it is asked for, or where `engine` leaves the choice and it pays; else pinned memory.
    EngineError when what was asked for does not work."""
    if engine not in ("auto", "gds"):
        return StreamMover(pools, device, forward_stream, f"no GPUDirect Storage with engine = {engine}")
    found = gds.probe()
    why = f"GPUDirect Storage would be {found.mode}: {found.reason}"
    if engine == "gds" or found.mode in PAYS:
        try:
            return GdsMover(pools, device, forward_stream, found.mode)
        except EngineError as error:
            if engine == "gds":
                raise
            why = f"GPUDirect Storage does not work: {error}"
    return StreamMover(pools, device, forward_stream, why)
