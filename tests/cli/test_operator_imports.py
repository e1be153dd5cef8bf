"""Operator commands start quickly because they import neither the solver nor its compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import importlib, sys
importlib.import_module(sys.argv[1])
heavy = ("eplb_core.solver", "llvmlite", "numba", "scipy")
print(*sorted(name for name in sys.modules if name in heavy or name.startswith("eplb_core.solver.")))
"""


@pytest.mark.parametrize("module", ["eplb_service.cli.operator", "eplb_service.cli.top"])
def test_an_operator_command_does_not_import_the_solver(module: str) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, module], capture_output=True, text=True, timeout=300, check=True
    )
    assert probe.stdout.split() == []
