"""The long run: `python -m tests.fuzz --inputs 1000000 --seed 1`. Inputs with a new outcome join the corpus."""

import argparse
import datetime
import re
import time
from itertools import islice
from pathlib import Path

import msgspec

from tests.fuzz.mutate import inputs
from tests.fuzz.parsers import PARSERS, Parser

CORPUS = Path(__file__).parent / "corpus"
KEPT_MAX = 60


def outcome(parser: Parser, data: bytes) -> str:
    """What an input leads to, without its particulars. Anything but an answer or a refusal is raised."""
    try:
        parser.parse(data)
    except parser.refuses as error:
        return f"{type(error).__name__}: {re.sub(r'[^a-z ]+', '', str(error).lower())[:60]}"
    return "good"


def corpus(name: str) -> list[bytes]:
    """Inputs of a parser that were worth keeping."""
    file = CORPUS / f"{name}.hex"
    return [bytes.fromhex(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(PARSERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was done there")
    options = parser.parse_args()
    date, done = datetime.datetime.now(datetime.UTC).date().isoformat(), {}
    for name in [options.only] if options.only else PARSERS:
        target, kept = PARSERS[name], corpus(name)
        seen = {outcome(target, data) for data in kept}
        began = time.monotonic()
        for data in islice(inputs(target.seeds, options.seed), options.inputs):
            found = outcome(target, data)
            if found not in seen and len(kept) < KEPT_MAX and len(data) < 2000:
                seen.add(found)
                kept.append(data)
        (CORPUS / f"{name}.hex").write_text("".join(f"{data.hex()}\n" for data in kept))
        done[name] = {"inputs": options.inputs, "seconds": round(time.monotonic() - began), "outcomes": len(seen)}
        print(name, done[name], flush=True)
    if options.json:
        record = {"date": date, "seed": options.seed, "parsers": done}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


if __name__ == "__main__":
    main()
