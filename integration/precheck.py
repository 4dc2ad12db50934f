"""Opens the store once before SGLang loads a model, so that a bad directory is told in seconds and not in minutes.

In a process of its own: SGLang's main process must not import prometheus_client before it has chosen its directory, nor
have a store's threads when it starts others.
"""

import logging
import subprocess
import sys

import msgspec

from tutti_sglang import errors
from tutti_sglang.config import Config, without_device

logger = logging.getLogger(__name__)

SECONDS = 60.0
_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tutti_sglang.integration import precheck
precheck.child()
"""


def open_once(config: Config) -> None:
    """Raise the TuttiError that opening the store raises; a check that cannot run is no reason not to start."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, msgspec.json.encode(sys.path).decode()],
            input=msgspec.json.encode(config),
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
        kind, message = msgspec.json.decode(done.stdout, type=tuple[str, str])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        logger.warning("tutti: the store could not be looked at before the start: %s", error)
        return
    if kind:
        raise getattr(errors, kind)(message)


def child() -> None:
    """Open and close the store of the settings on standard input; write the kind and text of what it raises."""
    from prometheus_client import CollectorRegistry

    from tutti_sglang.metrics import Metrics
    from tutti_sglang.store import ObjectStore

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    kind, message = "", ""
    try:
        small = msgspec.structs.replace(without_device(config), staging_size=1 << 20)
        ObjectStore(small, metrics=Metrics(CollectorRegistry())).close()
    except errors.TuttiError as error:
        kind, message = type(error).__name__, str(error)
    sys.stdout.buffer.write(msgspec.json.encode((kind, message)))
