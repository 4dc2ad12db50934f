"""SGLang's page hash extension, which it builds and loads at first use."""

from sglang.srt.mem_cache.utils import get_hash_str

from tutti_sglang.errors import UnsupportedError


def load_hashing() -> None:
    """Now, not at the first prefetch. UnsupportedError when it cannot be."""
    # Loaded inside the first prefetch otherwise, which then runs into SGLang's time-out; it may even need a compiler.
    try:
        get_hash_str([0], None, 1)
    except RuntimeError as error:
        raise UnsupportedError(
            f"SGLang's page hash extension does not load: {error.__cause__ or error}",
            "It is built at first use: install a C++ compiler and the OpenSSL headers (apt-get install g++ libssl-dev)",
        ) from error
