"""An SSD tier for SGLang's KV cache that is as good as DRAM."""

__version__ = "0.1.0"
