"""The services of docs/fleet.md run as they stand there: only addresses, sizes and the network are this machine's."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.kit import close_good, get, namespace, store_pages
from tests.store.peer.fleet_kit import MIB, Process, open_peer, program, require, shared
from tutti_sglang.config import PeerConfig
from tutti_sglang.integration.launch import free_port

PAGE = (Path(__file__).parents[3] / "docs" / "fleet.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def _units() -> dict[str, str]:
    """File name → text of each unit of systemd."""
    (block,) = _blocks("ini")
    parts = re.split(r"^# /etc/systemd/system/(\S+)\n", block, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _manifests() -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (block,) = _blocks("yaml")
    return list(yaml.safe_load_all(block))


def _by_hand() -> list[str]:
    """The commands of the master and of the memory, for a shell."""
    lines = "\n".join(_blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.partition("#")[0] for line in lines if line.startswith("mooncake_")]


def _by_systemd() -> list[str]:
    """As above."""
    starts = [re.search(r"^ExecStart=((?:.*\\\n)*.*)$", text, re.MULTILINE) for text in _units().values()]
    return [start[1].replace("\\\n", " ").replace("/opt/sglang/bin/", "") for start in starts if start]


def _by_kubernetes() -> list[str]:
    """As above."""
    found = []
    for manifest in _manifests():
        if "template" in manifest["spec"]:
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            command = [*container["command"], *container.get("args", [])]
            assert command[:2] == ["sh", "-c"] or "args" not in container
            found.append(command[2] if command[0] == "sh" else shlex.join(command))
    return found


def _here(command: str, ports: dict[str, str]) -> str:
    """With the addresses of this machine, and as much memory as a test may take."""
    for pattern, ours in {
        r"\bmooncake_(master|client)\b": lambda found: program(found[0]),
        r"[\w.-]+:50051": f"127.0.0.1:{ports['50051']}",
        r"\b(50051|50052)\b": lambda found: ports[found[0]],
        r"%H|\$NODE_IP|10\.0\.0\.11": "127.0.0.1",
        r'"64 GB"|\'64 GB\'': '"64 MB"',
        r"--protocol rdma": "--protocol tcp",
    }.items():
        command = re.sub(pattern, ours, command)  # type: ignore[arg-type]
    return command


@pytest.mark.parametrize("commands", [_by_hand, _by_systemd, _by_kubernetes])
def test_the_documented_services_are_a_fleet(commands: Callable[[], list[str]], disk: Path, tmp_path: Path) -> None:
    require()
    ports = {"50051": str(free_port()), "50052": str(free_port())}
    master, memory = (_here(command, ports) for command in commands())
    master += f" --metrics_port {free_port()}"
    services = []
    try:
        for name, command in (("master", master), ("memory", memory)):
            services.append(Process(tmp_path / name, "sh", "-c", f"exec {command.removeprefix('exec ')}"))
        services[-1].wait_for("Starting real client service")
        settings = PeerConfig(
            kind="mooncake", master=f"127.0.0.1:{ports['50051']}", publish="all", memory=4 * MIB, keep=False
        )
        one, two = (open_peer(disk / name, settings) for name in ("one", "two"))
        for store in (one, two):
            store.attach(namespace())
        store_pages(one, 1, *range(10))
        assert shared(one, 10)
        assert all(get(two, 1, *range(10)))
        close_good(one)
        close_good(two)
    finally:
        for service in services:
            service.kill()


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("no systemd here")
    for name, text in _units().items():
        program_here = str(tmp_path / "program")
        Path(program_here).write_text("#!/bin/sh\n")
        Path(program_here).chmod(0o755)
        (tmp_path / name).write_text(re.sub(r"/opt/sglang/bin/\w+", program_here, text))
    done = subprocess.run([verify, "verify", *map(str, tmp_path.glob("*.service"))], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_selects_pods_in_the_manifests_selects_those_there_are() -> None:
    manifests = _manifests()
    pods = {}
    for each in manifests:
        if "template" in each["spec"]:
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"] == labels
            pods[labels["app"]] = each["spec"]["template"]["spec"]["containers"][0]
    (service,) = [each for each in manifests if each["kind"] == "Service"]
    served = {port["containerPort"] for port in pods[service["spec"]["selector"]["app"]]["ports"]}
    assert {port["port"] for port in service["spec"]["ports"]} == served
    assert all(f"{service['metadata']['name']}:50051" in str(each) for each in (pods["mooncake-memory"], PAGE))
