"""An SSD tier for SGLang's KV cache that is as good as DRAM."""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"
"""The version of SGLang whose hooked targets were tested."""
