"""The direct path: between device pools and drives, no host tier. `integration/linker.py` is what SGLang sees of it."""
