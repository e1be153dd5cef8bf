"""Serve the embedded model with two vLLM servers on CPU under the same drifting load: ``make demo-vllm``.

One server is balanced by the agent, with a real service or, with ``--mode policy``, without one. The other is not
balanced. They serve alternately, so that other load on the machine affects both equally. The exit code is 1 if an
answer differs, a request fails or no layer was switched, and 2 if vLLM cannot be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest
from rich.console import Console
from rich.text import Text

from benchmarks.vllm_serving.run import serve_both, serve_policy
from benchmarks.vllm_serving.score import BESIDE, complaint, summary
from tests.engines.conftest import make_agent_site
from tests.engines.environments import VLLM_032, python_of
from tests.engines.openai_server import ServerError


def main() -> int:
    """Run the benchmark with the command-line settings. Return the exit code."""
    arguments = _arguments()
    console = Console()
    with contextlib.ExitStack() as stack:
        try:
            python = python_of(VLLM_032)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eplb-vllm-")))
            site = make_agent_site(folder)
        except (pytest.skip.Exception, subprocess.CalledProcessError) as reason:
            return _fail(console, f"vLLM with the agent cannot be installed: {reason}", 2)
        try:
            serve = serve_policy if arguments.mode == "policy" else serve_both
            results = serve(python, site, arguments, folder, console)
        except (ServerError, grpc.RpcError) as error:
            return _fail(console, str(error), 1)
    console.print(summary(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    reason = complaint(results, arguments.beside)
    return 0 if reason is None else _fail(console, reason, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo-vllm", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks of each server (2)")
    parser.add_argument("--redundant", type=int, default=8, help="redundant expert slots per layer (8)")
    parser.add_argument("--requests", type=int, default=192, help="requests to each server (192)")
    parser.add_argument(
        "--rounds", type=int, default=8, help="number of rounds in which the requests are sent (8)"
    )
    parser.add_argument("--clients", type=int, default=16, help="concurrent requests (16)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the requests (0)")
    parser.add_argument(
        "--beside", choices=BESIDE, default=BESIDE[0], help="what the service does during the run (deciding)"
    )
    parser.add_argument(
        "--mode",
        choices=["full", "policy"],
        default="full",
        help="what the agent does: it replaces vLLM's EPLB (full), or decides inside it, without a service (policy)",
    )
    parser.add_argument(
        "--split",
        choices=["engine", "step"],
        default="engine",
        help="how tokens are split over replicas: by a fixed rule (engine), or by each step's own counts (step)",
    )
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file")
    return parser.parse_args()


def _fail(console: Console, reason: str, code: int) -> int:
    console.print(Text(f"demo-vllm failed: {reason}", style="bold red"))
    return code


if __name__ == "__main__":
    sys.exit(main())
