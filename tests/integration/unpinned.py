"""An SGLang plugin of the tests: a prefill server sends the places of pages without pinned memory, a GPU's matter."""

import sys


def register() -> None:
    """Entry point: in scheduler processes."""
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        MooncakeKVSender.supports_host_tensor_indices = False
