"""Tests that each example runs and prints the output documented in its comments."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NEEDS_A_SERVICE = {"toy_host"}
"""Examples that ``service_with_three_ranks`` and tests/docs/test_adapter.py run instead."""


def documented_output(name: str) -> list[str]:
    """Return the lines of the comment at the end of an example, without numbers.

    Numbers are masked because the last digit of a PAR may differ between processors.
    """
    comment = (EXAMPLES / f"{name}.py").read_text().partition("\n# Output")[2]
    return [without_numbers(line.removeprefix("#   ")) for line in comment.splitlines()[1:]]


def without_numbers(line: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", "N", line)


def test_there_are_five_examples():
    assert len(SCRIPTS) == 5


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NEEDS_A_SERVICE])
def test_each_example_prints_its_documented_output(name):
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [without_numbers(line) for line in done.stdout.splitlines()]
    assert len(lines) >= 2
    assert lines == documented_output(name)
