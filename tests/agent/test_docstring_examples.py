"""The examples in the docstrings of the agent and its tools run as shown."""

from __future__ import annotations

import subprocess
import sys

import pytest

_RUN = (
    "import doctest, importlib, sys; sys.exit(doctest.testmod(importlib.import_module(sys.argv[1])).failed)"
)


@pytest.mark.parametrize(
    "module",
    [
        "worker_agent.agent",
        "worker_agent.live_layer",
        "worker_agent.forward_clock",
        "worker_agent.settings",
        "worker_agent.counting",
        "worker_agent.stepwise",
        "worker_agent.stepwise_tables",
        "eplb_lab.history.check",
        "eplb_lab.calibrate",
    ],
)
def test_docstring_examples_run_as_shown(module: str) -> None:
    # A separate process, because the agent's example opens a process group.
    result = subprocess.run([sys.executable, "-c", _RUN, module], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
