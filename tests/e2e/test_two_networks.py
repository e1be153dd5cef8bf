"""Test that ranks on two networks connect at their ``EPLB_AGENT_DATA_HOST`` addresses and switch a layer."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDRESSES = ("198.18.0.1", "198.18.0.2")
LINK = "eplb0"
WRONG = {
    "127.0.0.1": "rank 1: cannot bind the agents' socket to 127.0.0.1: .*set data_host to an address",
    "no-such-host.invalid": "rank 1: cannot bind the agents' socket to no-such-host.invalid: .*name",
    "198.18.0.9": "rank 1: cannot bind the agents' socket to 198.18.0.9: .*Cannot assign",
}
"""Data hosts for rank 1 that prevent the ranks from connecting, and the error that both ranks raise."""
_MOST_SECONDS = 400.0


def ip(*arguments: str) -> None:
    """Run ``ip``; raise an error if it fails."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Create two network namespaces, each with a loopback interface and one end of a link between them."""
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` from the iproute2 package")
    names = [f"eplb-{os.getpid()}-{side}" for side in "ab"]
    with ExitStack() as undo:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN: {error.stderr.strip()}")
            undo.callback(ip, "netns", "del", name)
        ip("link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
            for link in ("lo", LINK):
                ip("-n", name, "link", "set", link, "up")
        yield names


def within(namespace: str, *arguments: str, **streams: object) -> subprocess.Popen[str]:
    """Start a Python module in a namespace."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LINK}
    return subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **streams)


@pytest.mark.e2e
def test_a_layer_switches_between_two_networks(namespaces: list[str], tmp_path: Path) -> None:
    service = f"{ADDRESSES[0]}:50551"
    group = f"{ADDRESSES[0]}:29500"
    flags = "--insecure --window-steps 32 --decision-interval 32 --report-steps 8 --threads 1 --metrics 127.0.0.1:0"
    command = ["eplb_service.cli.main", "serve", "--listen", service, *flags.split()]
    log = (tmp_path / "service.log").open("w+")
    with ExitStack() as running:
        running.enter_context(log)
        processes = [within(namespaces[0], *command, stdout=log, stderr=log)]
        for rank, (namespace, address) in enumerate(zip(namespaces, ADDRESSES, strict=True)):
            arguments = (str(rank), group, service, address, *WRONG)
            rank_of = within(namespace, "tests.e2e.network_rank", *arguments, stdout=subprocess.PIPE)
            processes.append(rank_of)
        for process in processes:
            running.callback(process.wait)
            running.callback(process.kill)
        outputs = [process.communicate(timeout=_MOST_SECONDS)[0] for process in processes[1:]]
        log.seek(0)
        assert all(outputs), log.read()[-3000:]
    for output in outputs:
        facts = json.loads(output.splitlines()[-1])
        for host, (message, seconds) in facts["errors"].items():
            assert re.match(WRONG[host], message, re.IGNORECASE), message
            assert seconds < 60, host
        assert facts["halted"] is None
        assert facts["switched"] >= 1
        assert facts["worst"] < 1e-4
