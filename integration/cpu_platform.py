"""The CPU reference platform: the unmodified SGLang wheel, whole but slow, on a machine without a GPU.

Chosen by `SGLANG_PLATFORM=tutti_cpu`; `cpu_server.py` says how SGLang finds it. It is an out-of-tree platform because
SGLang's own CPU engine needs kernels that the wheel does not carry.
"""

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from tutti_sglang.integration import cpu_mamba, cpu_transfer
from tutti_sglang.integration.cpu_server import PLATFORM


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the class that SGLang instantiates; None unless it was asked for by name."""
    if envs.SGLANG_PLATFORM.get() != PLATFORM:
        return None
    return f"{__name__}.{TuttiCpuPlatform.__qualname__}"


class TuttiCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """SGLang's own CPU device, declared as out of tree, with PyTorch's attention."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int = 0) -> str:
        """The device's name: SGLang splits it at a colon, which the in-tree torch.device does not survive."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """Attention that needs no kernel of SGLang's."""
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Undo SGLang's choice for every `device == "cpu"` (platform_hook.py:161): the wheel lacks those kernels."""
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = self.get_default_attention_backend()

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Whether states of a recurrent model can be kept at page boundaries, so that pages may hold many tokens."""
        return True

    def init_backend(self) -> None:
        """In each worker, before any pool exists."""
        # SGLang's attention computes with queries that nobody wrote, too (torch_native_backend.py:122). Where their
        # memory holds denormals, a pass takes 80 times as long. Threads that PyTorch starts from now on take it over.
        torch.set_flush_denormal(True)
        cpu_transfer.install()
        cpu_mamba.install()
        from tutti_sglang.integration import cpu_attention, cpu_ranks  # of classes that ask for the platform

        cpu_attention.install()
        cpu_ranks.install()
