"""The NVMe drives of this machine, and the commands that give one to VFIO and back: `python -m tutti_sglang.gio.vfio
[ADDRESS]`. It changes nothing."""

import sys

from tutti_sglang.errors import EngineError
from tutti_sglang.gio.vfio import pci


def main(arguments: list[str]) -> int:
    """0 when the drive (every drive) can be used as it is."""
    try:
        found = [pci.look(address) for address in arguments] or pci.drives()
    except EngineError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    for function in found:
        problem = function.problem()
        print(problem or f"{function.address} ({function.model}) can be used. {pci.to_kernel(function.address)}")  # noqa: T201
    return int(any(function.problem() for function in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
