"""Every example in a docstring runs and prints what it shows."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPENS_A_PROCESS_GROUP = {"worker_agent.agent"}
"""Modules whose examples run in a separate process."""
PACKAGES = ("eplb_core", "eplb_lab", "eplb_service", "worker_agent", "benchmarks")


def modules_with_examples() -> list[str]:
    """Return the names of all modules whose source contains a doctest prompt."""
    return sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__main__.py" and ">>> " in path.read_text()
    )


def test_docstrings_contain_examples() -> None:
    assert len(modules_with_examples()) > 100


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples_print_their_documented_output(name: str) -> None:
    if name in OPENS_A_PROCESS_GROUP:
        run_in_its_own_process(name)
        return
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def run_in_its_own_process(name: str) -> None:
    program = f"import doctest, {name} as module; raise SystemExit(doctest.testmod(module).failed)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
