"""SGLang's entry point: makes `--hicache-storage-backend tutti` known, in each process only what that process needs."""

import logging
import sys

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by sglang.srt.plugins.load_plugins in every process of a server. Never raises: what did not take is found
    by `hooks.require` when the storage is attached, and stops the launch there."""
    try:
        from tutti_sglang.integration import flags

        flags.install()
        # The detokenizer must not pay seconds and gigabytes for hooks of the scheduler.
        if "sglang.srt.managers.scheduler" in sys.modules:
            from tutti_sglang.integration import hooks

            hooks.install()
    except Exception:
        logger.exception("tutti: the plugin could not be registered; is this SGLang supported?")
