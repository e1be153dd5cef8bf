"""Run a service and three ranks of the toy engine in one script until a layer has been switched.

Run it from the repository root: ``python examples/service_with_three_ranks.py``. It needs torch (``make demo`` sets up
an environment). The engine and its adapter are in ``toy_host.py``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile

from toy_host import serve_ranks

RANKS = 3
STEPS = 20_000
"""Steps after which the ranks stop even if no layer was switched."""
AFTER_SWITCH = 200
"""Steps that the ranks serve after the first switch."""


def free_address() -> str:
    """Return an address of this host with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def main() -> None:
    """Start the service, serve on all ranks, and print the result."""
    address = free_address()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--listen", address, "--metrics", "127.0.0.1:0", "--store", f"{folder}/state.sqlite3"]
        options += ["--window-steps", "64", "--decision-interval", "64", "--report-steps", "8"]
        command = [sys.executable, "-m", "eplb_service.cli.main", "serve", *options]
        service = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            results = serve_ranks(address, RANKS, STEPS, AFTER_SWITCH)
        finally:
            service.terminate()
            service.wait()
    switches = {count for _, count in results}
    largest_error = max(error for error, _ in results)
    print(f"layer switched on {RANKS} ranks: {switches != {0}}")
    print(f"same number of switches on every rank: {len(switches) == 1}")
    print(f"largest output error below 1e-4: {largest_error < 1e-4}")


if __name__ == "__main__":
    main()

# Output:
#   layer switched on 3 ranks: True
#   same number of switches on every rank: True
#   largest output error below 1e-4: True
