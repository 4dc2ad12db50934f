"""Attention data parallelism where the device is the CPU: SGLang moves tokens between ranks by what only GPUs have,
unless it runs on its own CPU engine, whose ways it gets here."""

from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers import dp_attention


def install() -> None:
    """A copy by torch in the place of a Triton kernel (layers/dp_attention.py:644), and collectives that are no
    custom operators: these are registered for other devices (distributed/parallel_state.py:1151, :1372). Idempotent."""
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor
