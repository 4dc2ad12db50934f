"""A store in a process of its own, so that it can live on another (network) host: commands as lines of JSON on stdin,
an answer for each on stdout."""

import json
import sys
import time
from pathlib import Path

from tests.store.kit import close_good, get, lookup, namespace, put
from tests.store.peer.fleet_kit import join, peer, serves, shared
from tutti_sglang.config import PeerConfig


def main() -> None:
    """Serve until stdin ends."""
    store = join(Path(sys.argv[1]), PeerConfig(**json.loads(sys.argv[2])))
    ns = store.attach(namespace())
    for line in sys.stdin:
        command, *numbers = json.loads(line)
        start = time.monotonic()
        match command:
            case "put":
                answer: object = sum(put(store, ns, *numbers))
                store.drain(8)
            case "get":
                answer = sum(get(store, ns, *numbers))
            case "lookup":
                answer = sum(lookup(store, ns, *numbers))
            case "serves":
                answer = serves(store)
            case "shared":
                answer = shared(store)
            case "wrong":
                answer = peer(store, "get", "wrong")
            case _:
                close_good(store)
                answer = True
        print(json.dumps([answer, time.monotonic() - start]), flush=True)


if __name__ == "__main__":
    main()
